"""Conversion of rows in any container to arrays, with nulls distinct from NaN."""

from __future__ import annotations

import decimal
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors

from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.rows import ROWS
from hvd_estimators.exceptions import ColumnError, DataError, ParamError, PredictionError
from hvd_estimators.inference.batch import BatchPredictor
from hvd_estimators.inference.output_columns import DOUBLE, OutputType
from hvd_estimators.inference.standalone_rows import read_rows, read_table
from hvd_estimators.loading.collate_fn import CollateFunction, Padding

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


def test_columns_hold_arrays_and_text() -> None:
    for given in (B, B.tolist(), pd.Series(list(B)), pa.array(list(B))):
        np.testing.assert_array_equal(read_table({"x": given}, ["x"], [], ()).columns["x"], B)
    images = pd.Series([np.full((2, 2), i) for i in range(3)])
    assert read_table({"x": images}, ["x"], [], ()).columns["x"].shape == (3, 2, 2)
    for given in (["a", "bc\0"], [b"\0", b"bc\0\0"]):
        texts = read_table({"x": given}, ["x"], [], {"x"}).columns["x"]
        assert (texts.dtype, texts.tolist()) == (object, given)


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


NESTED = [[[1, 2], [3, 4]], [[5, 6], None], [[7, 8], [9, 10]], [None, None], [[7, 8], [None, 10]]]


@pytest.mark.parametrize("form", ["lists", "rows", "pandas", "arrays", "arrow"])
def test_a_row_with_a_null_inner_array_is_a_row_with_a_null(form: str) -> None:
    def arrays(value: Any) -> Any:
        if not isinstance(value, list) or not any(isinstance(v, list) for v in value):
            return np.array(value) if isinstance(value, list) else value
        made = np.empty(len(value), object)
        for i, part in enumerate(value):
            made[i] = arrays(part)
        return made

    rows: Any = {
        "lists": {"a": NESTED},
        "rows": [{"a": value} for value in NESTED],
        "pandas": pd.DataFrame({"a": NESTED}),
        "arrays": {"a": [arrays(value) for value in NESTED]},
        "arrow": pa.table({"a": NESTED}),
    }[form]
    found = read_table(rows, ["a"], [], ())
    assert found.columns["a"].tolist() == [NESTED[0], NESTED[2]]
    assert found.valid is not None
    assert found.valid.tolist() == [True, False, True, False, False]
    with pytest.raises(DataError, match="'a' holds nulls"):
        read_table(rows, ["a"], [], (), keeps_nulls=False)


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


@pytest.mark.parametrize("form", ["table", "frame", "columns", "records"])
@pytest.mark.parametrize(("precision", "scale"), [(5, 2), (18, 18), (38, 0), (38, 9), (38, 38)])
def test_decimals_become_the_nearest_doubles(form: str, precision: int, scale: int) -> None:
    """Scalars and lists are compared with `float` of a Decimal, which rounds correctly."""
    rng = random.Random(precision)
    context = decimal.Context(prec=80)
    numbers = [
        decimal.Decimal(rng.randint(1 - 10**precision, 10**precision - 1)).scaleb(-scale, context)
        for _ in range(1000)
    ]
    pairs = [numbers[i : i + 2] for i in range(0, 1000, 2)]
    columns = {"a": numbers[:500], "b": pairs, "c": [[pair, pair] for pair in pairs]}
    kind = pa.decimal128(precision, scale)
    types = [kind, pa.list_(kind), pa.list_(pa.large_list(kind))]
    forms: dict[str, Any] = {
        "table": pa.table(columns, pa.schema(list(zip("abc", types, strict=True)))),
        "frame": pd.DataFrame(columns),
        "columns": columns,
        "records": [
            dict(zip("abc", row, strict=True)) for row in zip(*columns.values(), strict=True)
        ],
    }
    found = read_table(forms[form], ["a", "b", "c"], [], ()).columns
    np.testing.assert_array_equal(found["a"], [float(number) for number in numbers[:500]])
    expected = np.array([[float(number) for number in pair] for pair in pairs])
    np.testing.assert_array_equal(found["b"], expected)
    np.testing.assert_array_equal(found["c"], np.stack([expected, expected], 1))


@pytest.mark.parametrize("form", ["dictionary", "list view", "lists of dictionaries"])
def test_arrow_columns_of_any_layout_are_accepted(form: str) -> None:
    expected: Any = [[1.0, 2.0], [3.0, 4.0]]
    if form == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([1, 0, 2, 1]), pa.array([5.0, 6.0, None]))
        found = read_table({"a": column}, ["a"], [], ())
        assert found.valid is not None
        assert found.valid.tolist() == [True, True, False, True]
        assert found.columns["a"].tolist() == [6.0, 5.0, 6.0]
        return
    if form == "list view":
        if not hasattr(pa, "ListViewArray"):
            pytest.skip("this PyArrow has no list views")
        column = pa.ListViewArray.from_arrays(
            pa.array([2, 0, None], pa.int32()), pa.array([2, 2, 2], pa.int32()), [3.0, 4, 1, 2]
        )
    else:
        items = pa.array([1.0, 2, 3, 4]).dictionary_encode()
        column = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), items)
    found = read_table({"a": column}, ["a"], [], ())
    assert found.columns["a"].tolist() == expected


def test_vectors_and_tensors_keep_their_digits() -> None:
    vector = Vectors.dense([16777217.0])
    for values in ([vector], pd.Series([vector])):
        found = read_table({"v": values}, ["v"], [], ())
        assert found.columns["v"].tolist() == [[16777217.0]]
    found = read_table({"v": torch.ones(2, 3)}, ["v"], [], ())
    np.testing.assert_array_equal(found.columns["v"], np.ones((2, 3)))


def test_missing_text_of_pandas_is_none_for_a_collate_function() -> None:
    collate = CollateFunction(None, lambda rows: rows)
    inference = BatchPredictor(("t", "x"), InputColumns.of(["t", "x"]), True, collate=collate)
    frame = pd.DataFrame({"t": ["a", NAN, "b"], "x": [1.0, 2.0, NAN]})
    found = read_rows(frame, ["t", "x"], {"x": "float64"}, inference)
    given: Any = found.columns[ROWS]
    assert [row["t"] for row in given.to_rows()] == ["a", None, "b"]
    np.testing.assert_array_equal([row["x"] for row in given.to_rows()], [1.0, 2.0, NAN])


@pytest.mark.parametrize("form", [list, pd.DataFrame, pa.Table.from_pylist])
def test_rows_with_nulls_are_skipped_although_a_collate_function_takes_them(form: Any) -> None:
    given = form([{"t": "a"}, {"t": None}, {"t": "c"}])
    collate = CollateFunction(None, lambda rows: rows)
    inference = BatchPredictor(("t",), InputColumns.of(["t"]), True, collate=collate)
    for skips, count in ((False, 3), (True, 2)):
        found = read_rows(given, ["t"], {}, replace(inference, leaves_out_nulls=skips))
        assert found.count == count
        assert (None if found.valid is None else found.valid.tolist()) == (
            [True, False, True] if skips else None
        )


def test_labels_with_nulls_are_left_out() -> None:
    rows = [{"x": 1.0, "y": 0.0}, {"x": 2.0}]
    for keeps in (True, False):
        found = read_table(rows, ["x"], ["y"], (), labels=["y"], keeps_nulls=keeps)
        assert (found.count, found.valid, list(found.columns)) == (2, None, ["x"])
    found = read_table(rows, ["x"], ["y"], ())
    assert (found.count, list(found.columns)) == (1, ["x", "y"])
    found = read_table([{**row, "y": 1.0} for row in rows], ["x"], ["y"], ())
    assert list(found.columns) == ["x", "y"]


def test_a_null_in_a_list_is_a_null_of_the_row_for_a_collate_function() -> None:
    rows = [{"t": [1, 2]}, {"t": [1, None, 3]}, {"t": [[1], None]}, {"t": []}]
    takes_nulls: list[Any] = [CollateFunction(None, lambda rows: rows), Padding(None, {"t": 0.0})]
    for takes, collate in zip((True, False), takes_nulls, strict=True):
        inference = BatchPredictor(("t",), InputColumns.of(["t"]), True, collate=collate)
        found = read_rows(rows, ["t"], {"t": "int64"}, inference)
        valid = None if takes else [True, False, False, True]
        assert (found.count, None if found.valid is None else found.valid.tolist()) == (
            4 if takes else 2,
            valid,
        )
