"""Conversion of rows in any container to arrays, with nulls distinct from NaN."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from hvd_estimators.exceptions import ColumnError, DataError, ParamError, PredictionError
from hvd_estimators.inference.output_columns import DOUBLE, OutputType
from hvd_estimators.inference.standalone_rows import read_table

pytestmark = pytest.mark.versions

NAN = float("nan")
FLOATS = OutputType("float", 1)
A, B = np.array([1.0, NAN, 3.0]), np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize(
    "rows",
    [
        {"a": A, "b": B, "else": ["x", "y", "z"]},
        {"b": B.tolist(), "a": A.tolist()},
        pd.DataFrame({"a": A, "b": list(B)}),
        pd.DataFrame({"a": A, "b": B.tolist()}),
        pa.table({"a": A, "b": list(B)}),
        pa.record_batch([pa.FixedSizeListArray.from_arrays(B.reshape(-1), 2), A], ["b", "a"]),
        pa.concat_tables(
            [pa.table({"a": A[:1], "b": list(B[:1])}), pa.table({"a": A[1:], "b": list(B[1:])})]
        ),
    ],
)
def test_all_containers_give_the_same_arrays(rows: Any) -> None:
    found = read_table(rows, ["a", "b"], ["not there"], ())

    assert (found.count, found.valid, list(found.columns)) == (3, None, ["a", "b"])
    np.testing.assert_array_equal(found.columns["a"], A)
    np.testing.assert_array_equal(found.columns["b"], B)


@pytest.mark.parametrize(
    "column",
    [
        pd.Series([1, None, 3], dtype="Int64"),
        pd.Series([1, pd.NA, 3], dtype=object),
        np.array([1, None, 3], dtype=object),
        pa.array([1, None, 3]),
    ],
)
def test_nulls_are_distinguished_from_nan(column: Any) -> None:
    frame = {"a": column, "b": np.array([NAN, 0, 2])}
    found = read_table(frame, ["a", "b"], [], ())

    assert found.count == 2
    with pytest.raises(DataError, match="'a' holds nulls"):
        read_table(frame, ["a", "b"], [], (), keeps_nulls=False)
    assert found.columns["a"].tolist() == [1, 3]
    np.testing.assert_array_equal(found.columns["b"], [NAN, 2])
    predicted = {"p": (np.array([[NAN], [7.0]]), (1,), DOUBLE), "v": (np.eye(2), (2,), FLOATS)}
    kept, left = found.result(predicted, keeps=True), found.result(predicted, keeps=False)
    np.testing.assert_array_equal(kept["p"], [NAN, NAN, 7])
    np.testing.assert_array_equal(kept["v"], [[1, 0], [NAN, NAN], [0, 1]])
    np.testing.assert_array_equal(left["p"], [NAN, 7])
    assert kept["v"].dtype == left["v"].dtype == np.float32


def test_results_in_frames_and_tables_keep_nulls_index_and_types() -> None:
    table = pa.table({"a": [1, None, 3]})
    predicted = {
        "p": (np.array([NAN, 2.7]), (), DOUBLE),
        "i": (np.array([2.7, -2e9]), (), OutputType("int")),
        "m": (np.arange(4.0).reshape(2, 2, 1), (2, 1), OutputType("float", 2)),
    }
    made = read_table(table, ["a"], [], ()).result(predicted, keeps=True)
    assert made.column("p").null_count == 1
    assert np.isnan(made.column("p")[0].as_py())
    assert made.column("i").to_pylist() == [2, None, -2_000_000_000]
    assert made.schema.field("i").type == pa.int32()
    assert made.column("m").to_pylist() == [[[0.0], [1.0]], None, [[2.0], [3.0]]]
    assert made.schema.field("m").type.value_type.value_type == pa.float32()

    frame = table.to_pandas().astype("Int64").set_axis([5, 6, 7])
    assert read_table(frame, ["a"], [], ()).result(predicted, keeps=True).index.tolist() == [
        5,
        6,
        7,
    ]
    skipped = read_table(frame, ["a"], [], ()).result(predicted, keeps=False)
    assert (skipped.index.tolist(), skipped["i"].tolist()) == ([5, 7], [2, -2_000_000_000])

    too_large = {"i": (np.array([2.7, -3e10]), (), OutputType("int"))}
    for rows in (table, frame):
        with pytest.raises(PredictionError, match=r"i is -30000000000.0, which type int cannot"):
            read_table(rows, ["a"], [], ()).result(too_large, keeps=True)


@pytest.mark.parametrize(
    ("rows", "error", "told"),
    [
        ({"a": A}, ColumnError, "no column 'b'; the model takes a, b, and there are a"),
        ({"a": A, "b": B[:2]}, DataError, r"differ in length: \{'a': 3, 'b': 2\}"),
        ({"a": A, "b": ["x", "y", "z"]}, ColumnError, "'b' holds text"),
        ({"a": A, "b": np.array(["2020-01-01"] * 3, "M8[D]")}, ColumnError, "'b' holds datetime64"),
        ({"a": A, "b": [object()] * 3}, ColumnError, "'b' holds values that cannot be inputs"),
        ({"a": A, "b": [[1], [1, 2], [3]]}, DataError, "'b' is ragged"),
        (A, ParamError, "columns a, b by name: .* found ndarray"),
        ([A, A, A], ParamError, "columns a, b by name: .* found list"),
        (None, ParamError, "columns a, b by name: .* found NoneType"),
    ],
)
def test_invalid_inputs_are_reported(rows: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        read_table(rows, ["a", "b"], [], ())


@pytest.mark.parametrize("single", [False, True])
def test_single_rows_give_single_results(single: bool) -> None:
    class Row(tuple):
        """Tuple with ``asDict``, like Spark's Row."""

        def asDict(self) -> dict[str, Any]:
            return dict(zip("ab", self, strict=True))

    class Vector:
        def toArray(self) -> Any:
            return B[1]

    made = {"p": np.array([1.0, 2.0]), "q": np.arange(4.0).reshape(2, 2)}
    for form in (
        {"a": 5.0, "b": [2.0, 3.0], "else": "x"},
        {"a": 5, "b": Vector()},
        Row((np.float32(5), [2.0, 3.0])),
    ):
        rows = form if single else [form, {"b": (4.0, 5.0), "a": 6.0}]
        found = read_table(rows, ["a", "b"], [], ())
        assert found.columns["a"].tolist() == [5, 6][: found.count]
        np.testing.assert_array_equal(found.columns["b"], B[1:][: found.count])
        predicted = {
            n: (array[: found.count], array.shape[1:], DOUBLE) for n, array in made.items()
        }
        answer = found.result(predicted, keeps=True)
        answers = [answer] if single else answer
        assert [list(row) for row in answers] == [["p", "q"]] * found.count
        assert [row["p"] for row in answers] == [1, 2][: found.count]
        np.testing.assert_array_equal([row["q"] for row in answers], made["q"][: found.count])


def test_a_dict_is_one_row_if_it_holds_the_value_of_a_row() -> None:
    for value in (1.0, np.float32(1), decimal.Decimal(1), "a", b"a", bytearray(b"a")):
        row = {"a": value, "b": [1.0, 2.0]}
        assert read_table(row, ["a", "b"], [], ["a"]).count == 1
    for columns in ({"a": B[0]}, {"a": B}, {"a": pa.array(B[0])}, {"a": ["x", "y"]}):
        found = read_table(columns, ["a"], [], ["a"])
        assert found.count == len(columns["a"])
    # One of several rows, and a missing value beside another.
    assert read_table({"a": None, "b": 1.0}, ["a", "b"], [], ()).valid.tolist() == [False]


def test_nulls_and_missing_values_in_single_rows() -> None:
    rows = [{"a": 1.0, "b": "x"}, {"a": None, "b": "y"}, {"a": 3.0, "b": "z"}]
    found = read_table(rows, ["a", "b"], [], ["b"])
    assert found.columns["a"].tolist() == [1, 3]
    assert found.columns["b"].tolist() == ["x", "z"]
    assert found.valid is not None
    assert found.valid.tolist() == [True, False, True]
    with pytest.raises(DataError, match="'a' holds nulls"):
        read_table(rows, ["a", "b"], [], ["b"], keeps_nulls=False)
    with pytest.raises(ColumnError, match="no 'b' in row 1; the model takes a, b, and there are a"):
        read_table([{"a": 1.0, "b": 2.0}, {"a": 1.0}], ["a", "b"], [], ())
