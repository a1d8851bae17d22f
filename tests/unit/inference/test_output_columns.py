"""Conversion of predictions to column types, compared with exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data import arrays
from hvd_estimators.exceptions import ParamError, PredictionError
from hvd_estimators.inference.output_columns import DOUBLE, OutputType, output_types, to_column

pytestmark = pytest.mark.versions

NAN = float("nan")


@pytest.mark.parametrize(
    ("ddl", "expected", "shown"),
    [
        ("double", OutputType(), "double"),
        (" Array< ARRAY<Long>> ", OutputType("bigint", 2), "array<array<bigint>>"),
        ("REAL", OutputType("float"), "float"),
        ("Boolean", OutputType("boolean"), "boolean"),
    ],
)
def test_types_are_parsed_from_sparks_notation(ddl: str, expected: OutputType, shown: str) -> None:
    assert OutputType.parse(ddl) == expected
    assert str(expected) == shown


@pytest.mark.parametrize(
    "ddl", ["number", "array<>", "array<map<int,int>>", "timestamp", "decimal(9,1)", "string", ""]
)
def test_other_types_are_rejected(ddl: str) -> None:
    with pytest.raises(ParamError, match=r"output_types: .* is not a type .*cast the column"):
        OutputType.parse(ddl)


@pytest.mark.parametrize(
    ("ddls", "told"),
    [
        (["double"], "expected 2 types, one for each of a, b, found 1"),
        (["array<double>", None], r"a row of 'a' is one number; expected a type like 'double'"),
        ([None, "int"], r"a row of 'b' is an array of shape \(3,\).* 'array<int>'"),
    ],
)
def test_types_must_fit_their_outputs(ddls: Any, told: str) -> None:
    with pytest.raises(ParamError, match=f"output_types: {told}"):
        output_types(ddls, ["a", "b"], [(), (3,)])


@pytest.mark.parametrize("valid", [None, np.array([True, False, True, False])])
@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
@pytest.mark.parametrize("element", ["boolean", "smallint", "float", "double"])
def test_columns_of_all_types_and_depths(element: str, shape: Any, valid: Any) -> None:
    kind = OutputType(element, len(shape))
    array = np.array([1.5, NAN, -2.125, 0.0])[: 2 * math.prod(shape)].reshape(2, *shape)
    column = to_column(array, shape, valid, kind, "out")
    column.validate(full=True)
    exact: dict[str, Any] = {"boolean": bool, "smallint": int}

    def expected(value: Any) -> Any:
        if isinstance(value, list):
            return [expected(v) for v in value]
        if math.isnan(value):
            return NAN if element in exact_floats else None
        return exact.get(element, float)(value)

    exact_floats = ("float", "double")
    rows = expected(array.tolist())
    found = column.to_pylist()
    assert repr(found) == repr(rows if valid is None else [rows[0], None, rows[1], None])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", ["float32", "int64", "float16"])
def test_outputs_become_columns_of_doubles(shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(4 * np.prod(shape, dtype=int)).reshape(4, *shape).astype(dtype)
    if dtype != "int64":
        array.reshape(-1)[1] = np.nan
    values = array.reshape(-1).astype(float) if shape in ((), (1,)) else array.astype(float)

    column = to_column(array, shape)
    assert column.null_count == 0
    np.testing.assert_array_equal(np.array(column.to_pylist()), values)

    valid = np.array([False, True, True, False, True, True, False])
    column = to_column(array, shape, valid)
    column.validate(full=True)
    found = column.to_pylist()
    assert [value is not None for value in found] == valid.tolist()
    np.testing.assert_array_equal(np.array([v for v in found if v is not None]), values)

    none = to_column(array[:0], shape, np.zeros(2, bool))
    assert none.to_pylist() == [None, None]
    assert none.type == column.type


def test_outputs_become_integers_on_request() -> None:
    array = np.array([[1.0, np.nan], [2**24 + 1, -3.0]])
    valid = np.array([True, False, True])
    column = to_column(array, (2,), valid, OutputType("bigint", 1))
    assert column.to_pylist() == [[1, None], None, [2**24 + 1, -3]]
    assert to_column(array[:, 1], (), valid, OutputType("int")).to_pylist() == [None, None, -3]
    assert to_column(array[:, 0] > 2, (), None, OutputType("boolean")).to_pylist() == [False, True]
    half = to_column(array, (2,), None, OutputType("float", 1))
    assert half.type.value_type == pa.float32()
    assert half.to_pylist()[1] == [2**24, -3]


def test_integers_keep_all_digits_or_are_an_error() -> None:
    ids = np.array([2**53 + 1, -(2**63), 2**63 - 1, 5])
    column = to_column(ids.reshape(2, 2), (2,), None, OutputType("bigint", 1))
    assert column.to_pylist() == [[2**53 + 1, -(2**63)], [2**63 - 1, 5]]
    unsigned = ids.astype(np.uint64)
    for array, kind in [(ids, DOUBLE), (ids, OutputType("int")), (unsigned, OutputType("bigint"))]:
        with pytest.raises(PredictionError, match=r"out is .*, which type .* cannot hold"):
            to_column(array, (), None, kind, "out")
    exact = np.array([2**53, 2**60, -3])
    assert to_column(exact, ()).to_pylist() == [float(2**53), float(2**60), -3.0]


def test_lists_of_more_elements_than_32_bits_count_have_64_bit_offsets(monkeypatch: Any) -> None:
    array, valid = np.arange(24.0).reshape(4, 3, 2), np.array([True, False, True, True, True])
    expected = [to_column(array, (3, 2), mask).to_pylist() for mask in (None, valid)]
    monkeypatch.setattr(arrays, "_MOST_ELEMENTS", 11)
    for mask, rows in zip((None, valid), expected, strict=True):
        column = to_column(array, (3, 2), mask)
        column.validate(full=True)
        assert pa.types.is_large_list(column.type)
        assert column.to_pylist() == rows
