"""Numbers that a conversion changes are found; those that it keeps pass. NumPy and torch decide."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from hvd_estimators.data.exact import check_array, check_range, common_dtype
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
TARGETS = ["bool", "int8", "int16", "int32", "int64", "uint8", "bfloat16", "float16", *FLOATS]


def ends(dtype: str) -> list[Any]:
    info: Any = np.iinfo(dtype) if dtype in INTEGERS else np.finfo(dtype)
    return [info.min, info.max]


def is_kept(array: Any, target: str) -> bool:
    """Return whether Python's own numbers stay the same; floats may be rounded."""
    dtype = getattr(torch, target)
    (number,) = array.tolist()
    try:
        made = torch.tensor([number], dtype=dtype).item()
    except (RuntimeError, OverflowError):
        return False
    return bool(np.isfinite(made)) if isinstance(number, float) else made == number


def rejects(function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except DataError:
        return True
    return False


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("stored", [*INTEGERS, *FLOATS])
def test_numbers_at_the_ends_of_types(stored: str, target: str) -> None:
    if stored == "uint64":  # torch makes no tensors of them from Python's numbers
        ints = [0, 255, 2**24 + 1, 2**53 + 1, 2**63 - 1]
    elif stored in INTEGERS:
        whole = [2**8 + 1, 2**11 + 1, 2**24 + 1, 2**53 + 1]
        ints = [0, *ends(stored), *(n for n in whole if n <= ends(stored)[1])]
    else:
        ints = [0.5, *ends(stored), 1e10, -1e30]
        ints = ints if target.startswith(("float", "bfloat")) else [0.0, 1e30]
    for number in ints:
        array = np.array([number], stored)
        is_rejected = rejects(check_array, "x", array, target)
        # NumPy has no bfloat16, so its integers beyond the limit are all rejected.
        is_exact = target != "bfloat16" or stored in FLOATS
        is_changed = not is_kept(array, target)
        assert is_rejected == is_changed if is_exact else is_rejected >= is_changed, number
        spec = ColumnSpec("x", "scalar", stored, range=(array[0].item(), array[0].item()))
        by_range = rejects(check_range, spec, target, stored, "Set {}.".format)
        # A range says nothing about digits, so integers without a loss may be rejected by it.
        assert by_range >= is_rejected


def test_nan_and_infinity_pass_as_floats() -> None:
    check_array("x", np.array([np.nan, np.inf, -np.inf, 1.5]), "float32")
    with pytest.raises(DataError, match=r"'x' holds 1e\+300, and the model takes float32"):
        check_array("x", np.array([[np.nan, np.inf], [1e300, 0]]), "float32")


@pytest.mark.parametrize(
    ("spec", "target", "advice"),
    [
        (("int64", (0, 2**25), False), "float32", "Set int64"),
        (("int64", (0, 2**60), False), "float64", "Set int64"),
        (("uint64", (0, 2**64 - 1), False), "float32", "StringIndexer"),
        (("float64", (-1e300, 0.0), False), "float32", "Set float64"),
        (("float64", (0.0, 2.0**60), True), "float64", "Cast the column to bigint"),
        (("float64", (0.0, 2.0**30), True), "float32", "Set int64"),
    ],
)
def test_the_advice_names_a_type_that_holds_the_range(spec: Any, target: str, advice: str) -> None:
    dtype, limits, is_whole = spec
    column = ColumnSpec("x", "scalar", dtype, range=limits, is_whole=is_whole)
    with pytest.raises(DataError, match=rf"'x' holds .* as {target}, .*{advice}"):
        check_range(column, target, dtype, "Set {}.".format)


def test_a_common_type_holds_the_ends_of_both() -> None:
    for one, two in itertools.product([*INTEGERS, *FLOATS], repeat=2):
        common = common_dtype(one, two)
        numbers = [number for dtype in (one, two) if dtype in INTEGERS for number in ends(dtype)]
        promoted = np.promote_types(one, two)
        keeps = all(int(promoted.type(number)) == number for number in numbers)
        # The largest integers of a type are odd or powers of two, so they decide.
        assert (common is not None) == keeps, (one, two)
        assert common in (None, promoted.name)
    assert common_dtype("bool", "int8") is None
