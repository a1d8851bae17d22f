"""Conversions between types of numbers: which values they change, and the type that holds both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError

Range = tuple[Any, Any]
"""Smallest and largest number."""

_FLOATS = {
    "bfloat16": (2**8, 3.3895313892515355e38),
    "float16": (2**11, 65504.0),
    "float32": (2**24, float(np.finfo(np.float32).max)),
    "float64": (2**53, float(np.finfo(np.float64).max)),
}
"""Up to which integer, and up to which number at all, a type of floats has no gap."""


def limits(stored: str, target: str, *, is_whole: bool = False) -> Range | None:
    """Return the range of a type's numbers that another type holds; None if it holds all.

    Integers keep their digits. Floats may be rounded, but do not become infinite.

    Parameters
    ----------
    stored, target : str
        Names of the types, as NumPy or torch spells them.
    is_whole : bool
        Whether floats stand for integers, too.
    """
    is_float = stored in _FLOATS and not is_whole
    if (stored == target and not is_whole) or (
        stored not in _FLOATS and np.dtype(stored).kind not in "iu"
    ):
        return None
    if target in _FLOATS:
        # A decimal one above the last integer without a gap was rounded to that integer.
        end: Any = _FLOATS[target][is_float] - (stored == target)
        allowed: Range = (-end, end)
    elif target.removeprefix("u").startswith("int"):
        info = np.iinfo(target)
        allowed = (int(info.min), int(info.max))
    else:
        return None  # booleans and complex numbers
    low, high = _all_of(stored)
    return None if allowed[0] <= low and high <= allowed[1] else allowed


def _all_of(dtype: str) -> Range:
    if dtype in _FLOATS:
        return -_FLOATS[dtype][1], _FLOATS[dtype][1]
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def common_dtype(first: str, second: str) -> str | None:
    """Return the smallest type that holds all numbers of two types; None if there is none."""
    if first == second:
        return first
    if "bool" in (first, second) or "object" in (first, second):
        return None
    common = np.promote_types(first, second).name
    is_exact = all(limits(dtype, common) is None for dtype in (first, second))
    return common if is_exact else None


def check_range(spec: ColumnSpec, target: str, read_as: str, remedy: Callable[[str], str]) -> None:
    """Check that a type holds the numbers of a column whose range is known.

    Parameters
    ----------
    spec : ColumnSpec
        The column.
    target : str
        Name of the type.
    read_as : str
        Type in which readers deliver the column; a matrix may have another type.
    remedy : callable
        Returns a sentence on how to use another type.

    Raises
    ------
    DataError
        If the type does not hold the numbers.
    """
    allowed = limits(spec.dtype, target, is_whole=spec.is_whole)
    if allowed is None or spec.range is None or _is_within(spec.range, allowed):
        return
    holds_integers = spec.is_whole or spec.dtype not in _FLOATS
    wanted = "float64" if read_as in _FLOATS and not spec.is_whole else "int64"
    other = limits(spec.dtype, wanted, is_whole=spec.is_whole)
    if spec.is_whole and spec.dtype in _FLOATS and target == spec.dtype:
        other = allowed  # the files have lost the digits already
    if other is None or _is_within(spec.range, other):
        advice = remedy(wanted)
    elif holds_integers and _is_within(spec.range, _all_of("int64")):
        advice = "Cast the column to bigint, or name it outside of a list with floats."
    else:
        advice = "Make smaller numbers of them, such as the indices of StringIndexer."
    kind = "integers" if holds_integers else "numbers"
    raise DataError(
        f"Column {spec.name!r} holds {kind} from {spec.range[0]} to {spec.range[1]}, and training "
        f"reads it as {target}, which changes {kind} outside of {allowed[0]} to {allowed[1]}.",
        column=spec.name,
        remedy=advice,
    )


def _is_within(found: Range, allowed: Range) -> bool:
    return bool(allowed[0] <= found[0] and found[1] <= allowed[1])


def check_array(name: str, array: npt.NDArray[Any], target: str) -> None:
    """Check that a type holds the numbers of an array.

    Raises
    ------
    DataError
        If a number would lose digits, or become infinite.
    """
    allowed = limits(array.dtype.name, target) if array.dtype.kind in "iuf" else None
    if allowed is None or not array.size:
        return
    low, high = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)
    if not (low < allowed[0] or high > allowed[1]):  # NaN is neither less nor greater
        return
    changed = (array < allowed[0]) | (array > allowed[1])
    if array.dtype.kind == "f" and target in _FLOATS:
        changed &= ~np.isinf(array)
    wrong = array[changed]
    if array.dtype.kind != "f" and target in _FLOATS and target != "bfloat16":
        # Some integers beyond the limit are held. Python compares them to floats exactly.
        with np.errstate(over="ignore"):
            wrong = wrong[wrong.astype(target).astype(object) != wrong.astype(object)]
    if wrong.size:
        wanted = "float64" if array.dtype.kind == "f" else "int64"
        raise DataError(
            f"Column {name!r} holds {wrong[0]}, and the model takes {target}, which does "
            f"not hold this number. Fit the model with the column as {wanted}, or leave out such "
            "rows.",
            column=name,
        )


def check_labels(
    name: str, lowest: float, highest: float, classes: int, ignored: float | None = None
) -> None:
    """Check that the range of a label column lies within a model's classes.

    Parameters
    ----------
    name : str
        The label column.
    lowest, highest : float
        Its smallest and its largest number.
    classes : int
        Number of the model's classes.
    ignored : float, optional
        The number that the loss ignores.

    Raises
    ------
    DataError
        If a label is no class.
    """
    for label in (lowest, highest):
        if not 0 <= label < classes and label != ignored:
            raise DataError(
                f"{name} holds {label:g}; the model's {classes} outputs are classes 0 "
                f"to {classes - 1}. Number the classes from 0, with pyspark.ml.feature."
                "StringIndexer for example, or give the model an output for each class.",
                param="label_cols",
                column=name,
            )
