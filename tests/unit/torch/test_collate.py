"""Padding, and the inputs and labels of a collated batch."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.rows import GivenRows, RowTable
from hvd_estimators.exceptions import ColumnError, DataError, ParamError
from hvd_estimators.loading.collate import BoundedCollate, CollatedBatch
from hvd_estimators.loading.collate_fn import (
    CollateFunction,
    Padding,
    check_without_labels,
    split_batch,
)
from hvd_estimators.torch.tensors import TensorSpec

TABLE = pa.table(
    {
        "ids": pa.array([[1, 2], [], [3, 4, 5]], pa.list_(pa.int32())),
        "boxes": pa.array(
            [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], []], pa.list_(pa.list_(pa.float32()))
        ),
        "x": [1.0, 2.0, 3.0],
        "pair": [[1, 2], [3, 4], [5, 6]],
    }
)


def padded(columns: list[str], **given: Any) -> dict[str, Any]:
    made: dict[str, Any] = Padding(None, **given)(RowTable(TABLE.select(columns))).value
    return made


def test_columns_are_padded_to_the_longest_row_of_the_batch() -> None:
    made = padded(["ids", "boxes", "x", "pair"], values={"ids": 9, "boxes": -1.0}, masked=("ids",))
    assert list(made) == ["ids", "ids_mask", "boxes", "x", "pair"]
    assert made["ids"].tolist() == [[1, 2, 9], [9, 9, 9], [3, 4, 5]]
    assert made["ids"].dtype == np.int32
    assert made["ids_mask"].tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert made["boxes"].tolist() == [[[1, 2], [-1, -1]], [[3, 4], [5, 6]], [[-1, -1], [-1, -1]]]
    assert made["pair"].tolist() == [[1, 2], [3, 4], [5, 6]]
    first = Padding(None, {"ids": 0})(RowTable(TABLE.select(["ids"]))[:2]).value
    assert first["ids"].tolist() == [[1, 2], [0, 0]]
    empty = Padding(None, {"ids": 0})(RowTable(TABLE.select(["ids"]))[1:2]).value
    assert empty["ids"].tolist() == [[0]]


def test_matrices_are_stacked_beside_padded_columns() -> None:
    inputs = InputColumns.of([["x", "y"], "ids"])
    table = TABLE.select(["ids", "x"]).append_column("y", pa.array([4.0, 5.0, 6.0]))
    made = Padding(None, {"ids": 0}, (), inputs)(RowTable(table)).value
    assert made["features"].tolist() == [[1, 4], [2, 5], [3, 6]]


@pytest.mark.parametrize(
    ("column", "value", "error", "message"),
    [
        ([["a"], ["b", "c"]], 0, ColumnError, "^padding: expected arrays of numbers.*'c'"),
        (["a", "b"], 0, ColumnError, "^padding: expected arrays in the column 'c', found string"),
        ([[1], [2, None]], 0, DataError, "Column 'c' holds nulls.*collate_fn"),
        ([[1], [2, 3]], 0.5, ParamError, r"^padding: the column 'c' .* int64, which has no 0\.5"),
        ([[[1], [2, 3]], [[4]]], 0, DataError, "'c' is ragged"),
    ],
)
def test_columns_that_cannot_be_padded(
    column: Any, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Padding(None, {"c": value})(RowTable(pa.table({"c": column})))


def test_a_column_that_is_not_padded_has_rows_of_one_length() -> None:
    with pytest.raises(DataError, match=r"'ids' is ragged.*padding=\{'ids': 0\} or collate_fn"):
        padded(["ids", "x"], values={})


A, B, C = (torch.full((2,), float(number)) for number in range(3))
Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("value", "inputs", "labels"),
    [
        (A, {"f": A}, {}),
        ({"z": A, "f": B, "l": C}, {"f": B, "z": A}, {"l": C}),
        ((A, B), {"f": A}, {"l": B}),
        ([A, None], {"f": A}, {}),
        (((A, B), {"l": C}), {"input_0": A, "input_1": B}, {"l": C}),
        (({"p": A, "q": B}, [C]), {"p": A, "q": B}, {"l": C}),
        (Pair(A, C), {"f": A}, {"l": C}),
        ({"f": A, "w": B}, {"f": A}, {}),
    ],
)
def test_inputs_and_labels_are_found_in_a_batch(value: Any, inputs: Any, labels: Any) -> None:
    found = split_batch(value, ["f"], ["l"], ["w"])
    for parts, wanted in zip(found, (inputs, labels), strict=True):
        assert list(parts) == list(wanted)
        assert all(parts[name] is wanted[name] for name in wanted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((A, B, C), "a tuple of 3"),
        ({"f": "text"}, "str as the input 'f'"),
        ((A, "text"), "str as the label 'l'"),
    ],
)
def test_other_batches_are_errors(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split_batch(value, ["f"], ["l"])


def returning(alone: Any, with_label: Any) -> CollateFunction:
    return CollateFunction(None, lambda rows: with_label if "l" in rows[0] else alone)


ROWS_WITH_LABEL = RowTable(pa.table({"f": [1.0, 2.0], "l": [0.0, 1.0]}))


@pytest.mark.parametrize(
    ("alone", "with_label"),
    [
        (((A, B), None), ((A, B), C)),
        ((A, C), (A, C)),  # labels that are made of nothing
        (A, ((A, B), C)),  # a decoder's inputs are for training alone
        ({"f": A, "z": B}, {"f": A, "z": B, "l": C}),
        ("nothing", ((A, B), C)),
    ],
)
def test_functions_that_give_the_inputs_of_training_without_labels(
    alone: Any, with_label: Any
) -> None:
    check_without_labels(returning(alone, with_label), ROWS_WITH_LABEL, ["f"], ["l"])


@pytest.mark.parametrize("with_label", [((A, B), C), {"f": A, "z": B, "l": C}])
def test_a_second_input_that_becomes_the_label_without_labels(with_label: Any) -> None:
    with pytest.raises(ParamError, match=r"^collate_fn: .*2 inputs with .*\(\(a, b\), None\)"):
        check_without_labels(returning((A, B), with_label), ROWS_WITH_LABEL, ["f"], ["l"])


def test_a_second_input_that_becomes_a_label_although_there_are_none() -> None:
    spec = TensorSpec(("f",), ())
    with pytest.raises(DataError, match="no label_cols"):
        spec.batch(CollatedBatch(2, (A, B), None))
    assert len(spec.batch(CollatedBatch(2, ((A, B), None), None)).inputs) == 2


def test_tensors_keep_the_types_of_the_function_unless_they_are_named() -> None:
    ids, label = torch.tensor([1, 2]), torch.tensor([0.5, 1.5], dtype=torch.float64)
    batch = CollatedBatch(2, ({"ids": ids, "mask": ids > 1}, label), np.array([1.0, 2.0]))
    by_function = TensorSpec(("text",), ("l",), "w", dtypes={"ids": "int32"}, keeps_dtypes=True)
    made = by_function.batch(batch)
    assert [tensor.dtype for tensor in made.inputs] == [torch.int32, torch.bool]
    assert by_function.named(made.inputs).keys() == {"ids", "mask"}
    assert made.labels[0].dtype == torch.float64
    assert made.weights is not None
    assert made.weights.tolist() == [1.0, 2.0]
    assert made.rows == 2
    padding = TensorSpec(("ids",), ("l",))
    made = padding.batch(CollatedBatch(2, {"ids": ids, "ids_mask": ids > 1, "l": label}))
    assert [tensor.dtype for tensor in made.inputs] == [torch.float32, torch.bool]
    assert made.labels[0].dtype == torch.float32
    assert padding.batch(CollatedBatch(0)).rows == 0


def test_rows_of_a_predictor_have_the_types_of_training() -> None:
    given = [{"x": [1, 2.5], "t": "a", "n": [[1], []]}, {"x": np.array([3]), "t": None, "n": []}]
    rows = GivenRows(given, {"x": "float32", "n": "int64"})
    first, second = rows.to_rows()
    assert first["x"].dtype == second["x"].dtype == np.float32
    assert [part.dtype for part in first["n"]] == [np.int64, np.int64]
    assert second["t"] is None
    assert len(rows[1:]) == 1
    (flags,) = GivenRows([{"x": [np.bool_(True), np.bool_(False)]}], {}).to_rows()
    assert flags["x"].dtype == bool
    assert GivenRows([{"x": [1, 2]}], {"x": "int32"}).table.column("x").type == pa.list_(pa.int32())


def test_gradients_and_views_do_not_leave_the_function() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    collate = CollateFunction(None, lambda rows: tensor.t())
    made = collate(RowTable(TABLE.select(["x"])))
    assert isinstance(made.value, np.ndarray)
    assert made.value.shape == (3, 2)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), limit=st.integers(1, 100))
def test_parts_hold_each_row_once_and_are_bounded(sizes: list[int], limit: int) -> None:
    table = pa.table({"id": range(len(sizes)), "words": [[1] * size for size in sizes]})
    made = BoundedCollate(Padding(None, {"words": 0}), lambda row: len(row["words"]), float(limit))(
        RowTable(table)
    )
    found: list[int] = []
    for part in made.passes:
        rows, length = part.value["words"].shape
        assert rows == part.rows
        assert rows * length <= limit or rows == 1
        assert [sizes[row] for row in part.value["id"]] == part.value["words"].sum(axis=1).tolist()
        found += part.value["id"].tolist()
    assert sorted(found) == list(range(len(sizes)))
    assert made.rows == len(sizes)
    # As few parts as rows in the order of their sizes need.
    assert len(made.passes) == fewest_parts(sorted(sizes), limit)


def fewest_parts(sizes: list[int], limit: int) -> int:
    best = [0]
    for end in range(1, len(sizes) + 1):
        starts = [s for s in range(end) if (end - s) * sizes[end - 1] <= limit or end - s == 1]
        best.append(1 + min(best[start] for start in starts))
    return best[-1]


@pytest.mark.parametrize(
    ("size_fn", "message"),
    [
        (
            lambda row: len(row["text"]),
            "^batch_size_fn failed with KeyError: 'text'.*dict of column",
        ),
        (lambda row: 0, r"^batch_size_fn: expected a positive number .* found \[0, 0, 0\]"),
        (lambda row: [1, 2], "^batch_size_fn: expected a positive number"),
        (lambda row: float("nan"), "^batch_size_fn: expected a positive number"),
        (lambda row: "many", "^batch_size_fn failed with ValueError"),
    ],
)
def test_sizes_that_are_no_numbers(size_fn: Any, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        BoundedCollate(Padding(None, {"ids": 0}), size_fn, 4.0)(RowTable(TABLE.select(["ids"])))
