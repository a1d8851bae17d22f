"""Spark ML params: how one is declared, what it accepts, and the params in groups of one concern.

The groups are mixins of the estimators and models, a file each: an estimator's file says what it
does, and not what can be set.
"""

from hvd_estimators.params.param import (
    DeclaredParams,
    boolean,
    declare,
    functions,
    integer,
    names,
    number,
    numbers,
    objects,
    one_of,
    places,
    shapes,
    text,
    type_names,
)

__all__ = [
    "DeclaredParams",
    "boolean",
    "declare",
    "functions",
    "integer",
    "names",
    "number",
    "numbers",
    "objects",
    "one_of",
    "places",
    "shapes",
    "text",
    "type_names",
]
