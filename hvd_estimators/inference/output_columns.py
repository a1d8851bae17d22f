"""Names and types of the output columns of `transform`. Imports no PySpark."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, to_lists
from hvd_estimators.exceptions import ParamError, PredictionError
from hvd_estimators.inference.batch import is_scalar


def output_columns(get: Callable[[str], Any]) -> list[str]:
    """Return the names of the output columns, as set or by default.

    The default for an output that pairs with a label is ``<label>__output``. Other outputs are
    named after ``outputs``: ``<name>__output``, ``output_<position>``, or ``output`` if there is
    only one.

    Parameters
    ----------
    get : callable
        Function from the name of a model's param to its value.
    """
    given = get("outputCols")
    if given:
        return list(given)
    selected = get("outputs")
    if selected is None and get("label_columns") is None:
        return []
    labels = get("label_columns") or []
    if selected is None and labels and get("loss_form") != "joint":
        return [f"{label}__output" for label in labels]
    if selected is None:
        shapes = get("output_shapes")
        selected = range(1 if shapes is None else len(shapes))
    if len(selected) == len(labels):
        return [f"{label}__output" for label in labels]
    single = len(selected) == 1
    return [
        f"{key}__output" if isinstance(key, str) else "output" if single else f"output_{key}"
        for key in selected
    ]


_NAMES = {
    **dict.fromkeys(("tinyint", "byte"), "tinyint"),
    **dict.fromkeys(("smallint", "short"), "smallint"),
    **dict.fromkeys(("int", "integer"), "int"),
    **dict.fromkeys(("bigint", "long"), "bigint"),
    **dict.fromkeys(("float", "real"), "float"),
    **{name: name for name in ("double", "boolean")},
}

_DTYPES = {
    **{"tinyint": "int8", "smallint": "int16", "int": "int32", "bigint": "int64"},
    **{"float": "float32", "double": "float64", "boolean": "bool"},
}

_FLOATS = ("float", "double")

_ARRAY = re.compile(r"array\s*<(.*)>", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class OutputType:
    """Type of an output column.

    Attributes
    ----------
    element : str
        Spark's name for the type of the elements: "double", "int", "boolean", ...
    depth : int
        Number of nested arrays around an element.
    """

    element: str = "double"
    depth: int = 0

    @classmethod
    def parse(cls, ddl: str) -> OutputType:
        """Parse a type in Spark's notation, such as ``array<float>``.

        Raises
        ------
        ParamError
            If predictions cannot have the type.
        """
        leaf, depth = ddl.strip(), 0
        while match := _ARRAY.fullmatch(leaf):
            leaf, depth = match[1].strip(), depth + 1
        if leaf.lower() in _NAMES:
            return cls(_NAMES[leaf.lower()], depth)
        raise ParamError(
            f"output_types: {ddl!r} is not a type that predictions can have. Set a type of "
            "numbers or booleans, such as 'double', 'int', 'boolean' or 'array<float>', and cast "
            "the column to any other type after transform()."
        )

    def __str__(self) -> str:
        return "array<" * self.depth + self.element + ">" * self.depth

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type of the elements."""
        return np.dtype(_DTYPES[self.element])

    def elements(self, values: Array, name: str) -> pa.Array:
        """Convert numbers to the elements' type; NaN becomes null if the type has no NaN.

        The results equal Spark's casts. Integers lose the fraction.

        Parameters
        ----------
        values : array
            Numbers, in one dimension.
        name : str
            Name of the column, for messages.

        Raises
        ------
        PredictionError
            If the type cannot hold a number.
        """
        if self.element in _FLOATS:
            made = as_doubles(values, name) if self.element == "double" else values
            return pa.array(made.astype(self.dtype, copy=False))
        if values.dtype.kind in "biu" and self.element != "boolean":
            self._check_whole(values, name)
            return pa.array(values.astype(self.dtype))
        doubles = values.astype(np.float64, copy=False)
        is_nan = np.isnan(doubles)
        numbers = np.where(is_nan, 0, doubles)
        if self.element != "boolean":
            self._check_whole(numbers, name)
        return pa.array(numbers.astype(self.dtype), mask=is_nan if is_nan.any() else None)

    def _check_whole(self, numbers: Array, name: str) -> None:
        limit = 2 ** (8 * self.dtype.itemsize - 1)
        cut = numbers if numbers.dtype.kind in "biu" else np.trunc(numbers)
        wrong = (cut >= limit) | (cut < -limit)
        if wrong.any():
            raise PredictionError(
                f"{name} is {numbers[wrong][0]}, which type {self.element} cannot hold. Set a "
                "larger type in output_types, or none and cast what you need."
            )


DOUBLE = OutputType()


def as_doubles(values: Array, name: str) -> Array:
    """Return numbers as doubles.

    Raises
    ------
    PredictionError
        If an integer would lose digits.
    """
    doubles = values.astype(np.float64, copy=False)
    limit = 2**53
    if values.dtype.kind in "iu" and ((values > limit) | (values < -limit)).any():
        # Python compares integers with floats exactly.
        wrong = values[values.astype(object) != doubles.astype(object)]
        if wrong.size:
            raise PredictionError(
                f"{name} is {wrong[0]}, which type double cannot hold. Set 'bigint' (or "
                "'array<bigint>' for arrays) in output_types."
            )
    return doubles


def output_types(
    ddls: Sequence[str | None] | None, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[OutputType | None]:
    """Return the requested types; None for an output with the default type.

    Parameters
    ----------
    ddls : sequence of str or None
        The types in Spark's notation, one for each output.
    names : sequence of str
        Columns of the outputs.
    shapes : sequence of tuple of int
        Shape of a row of each output.

    Raises
    ------
    ParamError
        If the numbers of types and outputs differ, or if a type does not fit its output.
    """
    if ddls is None:
        return [None] * len(names)
    if len(ddls) != len(names):
        raise ParamError(
            f"output_types: expected {len(names)} types, one for each of {', '.join(names)}, found "
            f"{len(ddls)}: {list(ddls)}. Set None for an output that keeps its type."
        )
    types = [None if ddl is None else OutputType.parse(ddl) for ddl in ddls]
    for kind, name, shape in zip(types, names, shapes, strict=True):
        depth = 0 if is_scalar(shape) else len(shape)
        if kind is not None and kind.depth != depth:
            expected = OutputType(kind.element, depth)
            row = f"an array of shape {tuple(shape)}" if depth else "one number"
            raise ParamError(
                f"output_types: a row of {name!r} is {row}; expected a type like '{expected}', "
                f"found '{kind}'. Set '{expected}', or convert the column after transform()."
            )
    return types


def to_column(
    array: Array,
    shape: tuple[int, ...],
    valid: Array | None = None,
    kind: OutputType = DOUBLE,
    name: str = "The output",
) -> pa.Array:
    """Return an output as a column of numbers, or of nested lists of numbers.

    Parameters
    ----------
    array : array
        The output, rows first.
    shape : tuple of int
        Shape of a row.
    valid : array, optional
        Mask of the column's rows that the output has; the other rows are null.
    kind : OutputType
        Type of the column.
    name : str
        Name of the column, for messages.

    Raises
    ------
    PredictionError
        If the type cannot hold a number.
    """
    values = np.ascontiguousarray(array)
    column = kind.elements(values.reshape(-1), name)
    if is_scalar(shape):
        return column if valid is None else column.take(_positions(valid))
    return to_lists(column, values.shape, valid)


def _positions(valid: Array) -> pa.Array:
    return pa.array(np.cumsum(valid) - 1, mask=~valid)
