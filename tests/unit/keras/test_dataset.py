"""Conversion of runs of rows to batches of tensors, for any sizes and columns."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.dataset import ColumnDatasets, reading_first
from hvd_estimators.keras.tensorflow_dataset import column_dataset
from hvd_estimators.keras.tensors import Field, TensorSpec
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.loading.shuffle import Chunk, stream_batches


def make_columns(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=rows).astype(np.float32),
        "vector": rng.normal(size=(rows, 3)).astype(np.float32),
        "count": rng.integers(0, 9, rows),
        "b": rng.normal(size=rows).astype(np.float32),
        "flag": rng.integers(0, 2, rows).astype(bool),
    }


def runs(sizes: list[int]) -> Iterator[Chunk]:
    columns = make_columns(sum(sizes))
    yield from stream_batches([columns], sizes)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 5, 3], [2, 1, 0, 0], [7]])
def test_batches_equal_the_runs_of_rows(sizes: list[int]) -> None:
    expected = [batch for run in runs(sizes) for batch in run.batches()]
    dataset = column_dataset(lambda: runs(sizes), next(runs(sizes)))
    shapes = {tuple(spec.shape) for spec in keras.tree.flatten(dataset.element_spec)}
    assert shapes == {(None,), (None, 3)}
    for _ in range(2):
        found = list(dataset)
        assert len(found) == len(expected)
        for batch, columns in zip(found, expected, strict=True):
            assert set(batch) == set(columns)
            for name, array in columns.items():
                np.testing.assert_array_equal(batch[name].numpy(), array)


class OwnModule(DataModule):
    """User-written data module that only yields batches."""

    def train_data(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield from ({"x": np.full(2, n, np.float64)} for n in range(3))

    def val_data(self) -> Iterator[dict[str, np.ndarray]]:
        yield from ({"x": np.full(rows, 7.0)} for rows in (2, 1))


def test_custom_data_modules_train_endlessly_and_validate_repeatedly() -> None:
    datasets = ColumnDatasets(OwnModule(train_dir="", val_dir=""), prefetch=1)
    train = [int(batch["x"][0]) for batch in datasets.train().take(5)]
    assert train == [0, 1, 2, 0, 1]
    validation = datasets.validation(steps=9)
    for _ in range(2):
        assert [len(batch["x"]) for batch in validation] == [2, 1]
    assert len(list(datasets.validation(steps=1))) == 1
    # Their number is unknown before a pass.
    assert datasets.validation(steps=9).cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert datasets.train().cardinality() == tf.data.INFINITE_CARDINALITY


def test_no_chunk_is_read_ahead_after_the_last_batch() -> None:
    is_beyond = threading.Event()

    class Finite(OwnModule):
        def num_train_batches(self) -> int:
            return 3

        def train_data(self) -> Iterator[dict[str, np.ndarray]]:
            yield from itertools.islice(super().train_data(), 3)
            is_beyond.set()

    batches = iter(ColumnDatasets(Finite(train_dir="", val_dir=""), prefetch=1).train())
    assert [int(next(batches)["x"][0]) for _ in range(3)] == [0, 1, 2]
    assert not is_beyond.wait(0.3)


class Guide(keras.Model):
    """Model with the custom test step of Keras's guide and a counter of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.steps = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.compute_loss(y=y, y_pred=y_pred))
        self.steps.assign_add(1.0)
        return {"loss": self.loss_tracker.result()}


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_steps_without_a_batch_change_nothing(batches: int, steps_per_execution: int) -> None:
    def generate() -> Iterator[Any]:
        for number in range(batches):
            yield np.full((2, 3), number + 1.0), np.zeros((2, 1))

    dataset = tf.data.Dataset.from_generator(
        generate, output_signature=(tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))
    )
    model = Guide()
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model(np.zeros((1, 3)))
    model.test_step = reading_first(model.test_step)
    # Keras does not know the number of batches.
    model.evaluate(dataset, verbose=0)
    assert float(model.steps.numpy()) == batches
    assert float(model.loss_tracker.count.numpy()) == batches
    squares = [(3.0 * (number + 1)) ** 2 for number in range(batches)]
    assert float(model.loss_tracker.total.numpy()) == sum(squares)


def test_columns_get_the_models_shapes_and_types() -> None:
    tensors = TensorSpec(
        {"image": Field("vector", (3, 1)), "id": Field("a", (1,), "int32")},
        (Field("count"), Field("b"), Field("flag")),
        "b",
    )
    dataset = column_dataset(lambda: runs([3, 2]), next(runs([3, 2])), form=tensors.tensors)
    columns = make_columns(5)
    (x, y, weight), last = dataset
    assert x["image"].shape == (3, 3, 1)
    assert x["id"].dtype == tf.int32
    assert [tensor.dtype.name for tensor in y] == ["int64", "float32", "float32"]
    assert {tuple(tensor.shape) for tensor in y} == {(3, 1)}
    np.testing.assert_array_equal(weight, columns["b"][:3])
    assert last[0]["image"].shape == (2, 3, 1)
    # Conversion in NumPy, as in the driver and transform(), gives the same result.
    for a, b in zip(
        keras.tree.flatten(tensors.arrays({k: v[:3] for k, v in columns.items()})),
        keras.tree.flatten((x, y, weight)),
        strict=True,
    ):
        assert a.dtype == b.dtype.as_numpy_dtype
        np.testing.assert_array_equal(a, b)
