"""Spark ML params: how one is declared, what it accepts, and the params in groups of one concern.

The groups are mixins of the estimators and models, a file each: an estimator's file says what it
does, and not what can be set.
"""

from hvd_estimators.params.param import (
    DeclaredParams,
    boolean,
    column_names,
    functions,
    integer,
    number,
    numbers,
    objects,
    one_of,
    param,
    places,
    shapes,
    string,
    type_names,
)

__all__ = [
    "DeclaredParams",
    "boolean",
    "column_names",
    "functions",
    "integer",
    "number",
    "numbers",
    "objects",
    "one_of",
    "param",
    "places",
    "shapes",
    "string",
    "type_names",
]
