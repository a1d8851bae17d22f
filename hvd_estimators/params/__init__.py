"""Spark ML params: declarations, converters, and mixins that group params by purpose.

Estimators and models inherit the mixins, one file per group. The estimators' own files contain only
behavior.
"""

from hvd_estimators.params.param import (
    DeclaredParams,
    boolean,
    column_names,
    functions,
    input_columns,
    integer,
    keyword_arguments,
    narrowed,
    number,
    numbers,
    objects,
    one_of,
    output_keys,
    param,
    shapes,
    string,
    type_names,
)

__all__ = [
    "DeclaredParams",
    "boolean",
    "column_names",
    "functions",
    "input_columns",
    "integer",
    "keyword_arguments",
    "narrowed",
    "number",
    "numbers",
    "objects",
    "one_of",
    "output_keys",
    "param",
    "shapes",
    "string",
    "type_names",
]
