"""Prediction of the UDF's batches, in this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.inference import worker
from hvd_estimators.inference.batch import BatchPredictor, Resources, check_outputs, one_ahead


class Predicting:
    """Predictor that refers to itself."""

    def __init__(self) -> None:
        self.itself = self

    def __call__(self, arrays: Any) -> Any:
        return arrays


@pytest.fixture
def no_predictors() -> Iterator[None]:
    yield
    gc.unfreeze()
    worker._predictors.clear()


def test_garbage_collection_skips_a_predictor_until_it_is_replaced(no_predictors: None) -> None:
    made: list[weakref.ref[Predicting]] = []

    def load(document: bytes) -> Callable[..., Any]:
        predictor = Predicting()
        made.append(weakref.ref(predictor))
        return predictor

    worker.cached_predictor("a", b"", load)
    # All imported objects, and the predictor.
    assert gc.get_freeze_count() > 10_000
    assert not any(entry is made[0]() for entry in gc.get_objects())
    worker.cached_predictor("a", b"", load)
    assert len(made) == 1

    worker.cached_predictor("b", b"", load)
    assert made[0]() is None
    assert made[1]() is not None
    assert gc.get_freeze_count() > 10_000


class Queued:
    """Predictor like one on a GPU; records starts and waits."""

    overlaps = True

    def __init__(self) -> None:
        self.done: list[str] = []

    def __call__(self, arrays: Any) -> Any:
        return self.begin(arrays)()

    def begin(self, arrays: Any) -> Callable[[], Any]:
        rows = f"{arrays[0][0]:g}-{arrays[0][-1]:g}"
        self.done.append(f"begin {rows}")

        def finish() -> Any:
            self.done.append(f"wait {rows}")
            return [2 * arrays[0]]

        return finish


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_next_forward_pass_starts_before_the_wait_for_outputs(overlaps: bool) -> None:
    predictor = Queued()
    predictor.overlaps = overlaps
    steps = BatchPredictor(("x",), InputColumns.of(["x"]), shapes=((),), batch_rows=2)
    batches = [np.arange(5.0), np.arange(5.0, 6.0), np.arange(6.0, 9.0)]

    begun = (steps.begin(predictor, {"x": batch}) for batch in batches)
    found = [output.tolist() for (output,) in one_ahead(begun, predictor)]

    assert found == [(2 * batch).tolist() for batch in batches]
    passes = ["0-1", "2-3", "4-4", "5-5", "6-7", "8-8"]
    begins, waits = (
        [predictor.done.index(f"{what} {rows}") for rows in passes] for what in ("begin", "wait")
    )
    assert begins == sorted(begins)
    for next_begins, waits_for_it in zip(begins[1:], waits, strict=False):
        assert (next_begins < waits_for_it) == overlaps


@pytest.mark.parametrize(
    ("outputs", "shapes", "message"),
    [
        ([(4, 2)], [(2,), ()], "returned 1 outputs, and 2 were expected"),
        ([(3, 2)], [(2,)], r"Output 0 .* shape \(3, 2\) for 4 rows; expected \(4, 2\)"),
        ([(4,), (4, 2)], [(), ()], r"Output 1 .* shape \(4, 2\) for 4 rows; expected \(4,\)"),
        ([(4, 2)], [(2, 1)], r"shape \(4, 2\) for 4 rows; expected \(4, 2, 1\)"),
        ([()], [()], r"shape \(\) for 4 rows"),
    ],
)
def test_unexpected_outputs_are_rejected(outputs: Any, shapes: Any, message: str) -> None:
    made = list(map(np.zeros, outputs))
    with pytest.raises(ShapeError, match=message):
        check_outputs(made, 4, shapes)
    with pytest.raises(ShapeError, match=message):
        BatchPredictor(("x",), InputColumns.of(["x"]), shapes=tuple(shapes))(
            lambda arrays: made, {"x": np.zeros(4)}
        )


def test_output_sizes_and_shapes_of_numbers_may_differ() -> None:
    check_outputs([np.zeros((4, 3)), np.zeros((4, 1)), np.zeros(4)], 4, [(2,), (), (1,)])
    with pytest.raises(ShapeError, match="Output 0 of the model is object; expected numbers"):
        check_outputs([np.array(["a"], object)], 1, [()])


def test_tasks_with_different_resources_have_different_predictors(no_predictors: None) -> None:
    def load(document: bytes, resources: Resources) -> Any:
        return lambda arrays: resources.gpu

    found = [worker.cached_predictor("a", b"", load, Resources(1, gpu))([]) for gpu in (0, 1, 1, 0)]
    assert found == [0, 1, 1, 0]


def test_empty_batches_have_outputs_of_the_right_shapes() -> None:
    steps = BatchPredictor(("x",), InputColumns.of(["x"]), shapes=((), (3,), (2, -1)))
    found = steps(lambda arrays: pytest.fail("it has nothing to predict"), {"x": np.zeros(0)})
    assert [output.shape for output in found] == [(0,), (0, 3), (0, 2, 1)]


def test_labels_that_are_null_in_part_are_left_out_of_a_transformation() -> None:
    seen = []

    def double(columns: Any) -> Any:
        seen.append(set(columns))
        return {"x": 2 * columns["x"]}

    transformation: Any = double
    metadata = {name: {"dtype": "float64"} for name in ("x", "label")}
    made = BatchPredictor.of(InputColumns.of(["x"]), transformation, metadata, labels=["label"])
    inference = replace(made, keeps_nulls=True)
    x, labels = pa.array([1.0, 2.0, None]), pa.array([5.0, None, 6.0])
    for label, expected in ((labels, {"x"}), (pa.array([5.0, 6.0, 7.0]), {"x", "label"})):
        arrays, valid = inference.read([x, label])
        assert valid is not None
        assert valid.tolist() == [True, True, False]
        (found,) = inference.inputs(arrays, None)
        assert found.tolist() == [2.0, 4.0]
        assert seen.pop() == expected


def transforming() -> BatchPredictor:
    metadata = {"x": {"dtype": "int32"}, "y": {"dtype": "int64"}}
    features = InputColumns.of(["x"])
    return BatchPredictor.of(features, lambda columns: columns, metadata, labels=["y", None])


@pytest.mark.parametrize(
    "wrong", [[1.0, np.nan], [1.0, 2.5], [1.0, 5e9], np.array([1, 5_000_000_000]), ["1", "n/a"]]
)
def test_a_transformation_gets_the_values_of_training_or_none(wrong: Any) -> None:
    array = np.array(wrong, object) if isinstance(wrong[0], str) else np.asarray(wrong)
    with pytest.raises(DataError, match=r"Column 'x' holds") as caught:
        transforming().inputs({"x": array}, None)
    assert caught.value.column == "x"
    # A label, which most transformations do not need.
    given: list[Any] = []

    def record(columns: Any) -> Any:
        given.append(columns)
        return columns

    inference = replace(transforming(), transformation=record)
    inference.inputs({"x": np.array([3.0]), "y": np.array([np.nan])}, None)
    assert [{n: a.dtype.name for n, a in columns.items()} for columns in given] == [{"x": "int32"}]


def test_whole_numbers_are_floats_where_training_had_floats() -> None:
    features = InputColumns.of(["x", "n", "t"])
    metadata = {"x": {"dtype": "float64"}, "n": {"dtype": "int64"}, "t": {"dtype": "object"}}
    inference = BatchPredictor.of(features, None, metadata)
    whole = {name: np.array([1, 2]) for name in ("x", "n", "t")}
    found = inference.inputs(whole, None)
    assert [array.dtype.name for array in found] == ["float64", "int64", "int64"]
    short = {**whole, "x": np.array([1.5], np.float32)}
    assert inference.inputs(short, None)[0].dtype.name == "float32"
