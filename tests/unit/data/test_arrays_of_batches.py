"""Arrow columns as arrays, compared with Arrow's conversion of each value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.arrays import rows_of, to_array, valid_rows
from hvd_estimators.exceptions import DataError
from hvd_estimators.inference.batch import to_arrays

pytestmark = pytest.mark.versions

NESTED = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 10.0], [11.0, 12.0]]]
FIXED = pa.list_(pa.list_(pa.float32(), 2), 2)


@pytest.mark.parametrize(
    ("values", "data_type", "dtype"),
    [
        ([3, -1, 2], pa.int8(), "int8"),
        ([3, -1, 2**40], pa.int64(), "int64"),
        ([0.5, float("nan"), 2], pa.float64(), "float64"),
        ([True, False, True], pa.bool_(), "bool"),
        (["a", "", "ü"], pa.string(), "object"),
        ([b"a", b"", b"\0"], pa.binary(), "object"),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, float("nan")]], pa.list_(pa.float32()), "float32"),
        ([[True, False], [True, True], [False, False]], pa.list_(pa.bool_()), "bool"),
        ([[], [], []], pa.list_(pa.int16()), "int16"),
        (NESTED, pa.list_(pa.list_(pa.float64())), "float64"),
        (NESTED, pa.large_list(pa.large_list(pa.float64())), "float64"),
        (NESTED, FIXED, "float32"),
    ],
)
def test_columns_become_arrays(values: Any, data_type: pa.DataType, dtype: str) -> None:
    column = pa.array(values, data_type)
    for part, rows in ((column, values), (column.slice(1), values[1:]), (column[1:2], values[1:2])):
        assert valid_rows(part) is None
        found = to_array(part, "x")
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.array(rows, dtype))
    assert len(to_array(column[:0], "x")) == 0


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def dense(*values: float) -> Any:
    return {"type": 1, "values": values}


def sparse(size: int, entries: dict[int, float]) -> Any:
    return {"type": 0, "size": size, "indices": [*entries], "values": [*entries.values()]}


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([dense(1, 0.1, 3), dense(4, 5, 6)], [[1, 0.1, 3], [4, 5, 6]]),
        ([sparse(3, {}), sparse(3, {2: 5.0, 0: 1.5})], [[0, 0, 0], [1.5, 0, 5]]),
        (
            [sparse(2, {1: 0.1}), dense(1, 2), dense(3, 4), sparse(2, {0: 7})],
            [[0, 0.1], [1, 2], [3, 4], [7, 0]],
        ),
    ],
)
def test_vectors_become_32_bit_floats(vectors: Any, expected: Any) -> None:
    column = pa.array(vectors, VECTOR)
    found = to_array(column, "x")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    np.testing.assert_array_equal(to_array(column[1:], "x"), found[1:])


@pytest.mark.parametrize(
    ("values", "data_type"),
    [
        ([[1.0], [1.0, 2.0]], pa.list_(pa.float64())),
        ([[[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]]], pa.list_(pa.list_(pa.float64()))),
        ([[[1.0, 2.0]], [[1.0], [2.0]]], pa.list_(pa.list_(pa.float64()))),
        ([dense(1, 2), dense(1, 2, 3)], VECTOR),
        ([dense(1, 2), sparse(3, {0: 1.0})], VECTOR),
    ],
)
def test_arrays_of_other_lengths_are_ragged(values: Any, data_type: pa.DataType) -> None:
    with pytest.raises(DataError, match="Column 'x' is ragged"):
        to_array(pa.array(values, data_type), "x")


@pytest.mark.parametrize(
    ("values", "data_type"),
    [
        ([1.0, None, float("nan"), 3.0], pa.float64()),
        ([None, [1.0, None], [1.0, float("nan")], [1.0, 2.0]], pa.list_(pa.float64())),
        ([[[1.0], [None]], [[1.0], None], None, [[1.0], [2.0]]], pa.list_(pa.list_(pa.float64()))),
        ([None, [1.0, None], [2.0, 1.0]], pa.list_(pa.float64(), 2)),
        ([None, dense(1, 2)], VECTOR),
        (["a", None], pa.string()),
    ],
)
def test_nulls_are_distinguished_from_nan(values: Any, data_type: pa.DataType) -> None:
    def holds_null(value: Any) -> bool:
        return value is None or (isinstance(value, list) and any(map(holds_null, value)))

    column = pa.array(values, data_type)
    for start in range(len(values)):
        expected = [not holds_null(value) for value in values[start:]]
        found = valid_rows(column[start:])
        if found is None:
            assert all(expected)
            continue
        assert found.tolist() == expected
        rest = to_array(column[start:].filter(pa.array(found)), "x")
        assert len(rest) == sum(expected)


LISTS = pa.list_(pa.float32())
STRUCTS = pa.struct([("kind", pa.int8()), ("values", pa.list_(pa.field("element", pa.float64())))])


@pytest.mark.parametrize(
    ("values", "data_type"),
    [
        ([None, [1.0, 2.0], None, [], [3.0, None], None], LISTS),
        ([[9.0], [1.0, 2.0], None, [], [3.0, 4.0], [8.0]], LISTS),
        ([None, [1.0], None, None, [3.0], None], LISTS),
        ([None, [[1.0], None], None, [], [[3.0]], None], pa.list_(LISTS)),
        ([None, 1.0, None, 2.0, None, None], pa.float64()),
        ([None, "a", None, "b", "c", None], pa.string()),
        (
            [
                None,
                {"kind": 1, "values": [1.0]},
                None,
                {"kind": 0, "values": None},
                {"kind": 1, "values": [2.0, 3.0]},
                {"kind": 2, "values": [4.0]},
            ],
            STRUCTS,
        ),
    ],
)
def test_selected_rows_agree_with_arrows_filter(values: Any, data_type: pa.DataType) -> None:
    wanted = np.array([False, True, False, True, True, False])
    for column in (pa.array(values, data_type), pa.array([None, *values], data_type)[1:]):
        found = rows_of(column, wanted)
        found.validate(full=True)
        assert found.type == data_type
        assert found.to_pylist() == column.filter(pa.array(wanted)).to_pylist()


def arrays(column: pa.Array, **options: Any) -> tuple[Any, Any]:
    found, valid = to_arrays(["x"], [column], **options)
    return found["x"], valid


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0], [3.0]], "'x' is ragged"),
        ([[[1.0, 2.0]], [[3.0]]], "'x' is ragged"),
        ([[[1.0], [2.0]], [[3.0]]], "'x' is ragged"),
        ([[[1.0], None], [[3.0], [4.0]]], "'x' holds nulls"),
        ([[True, None], [True, False]], "'x' holds nulls"),
    ],
)
def test_ragged_arrays_and_nulls_within_are_rejected(rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        arrays(pa.array(rows))


def test_rows_with_nulls_are_skipped_if_kept_as_null_predictions() -> None:
    found, valid = arrays(pa.array([1.0, None, float("nan")]), keeps_nulls=True)
    assert valid.tolist() == [True, False, True]
    np.testing.assert_array_equal(found, [1.0, np.nan])
