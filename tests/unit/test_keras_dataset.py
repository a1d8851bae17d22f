"""Runs of rows become the same batches as tensors, whatever their sizes and columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.dataset import ColumnDatasets, column_dataset
from hvd_estimators.keras.tensors import Field, TensorSpec
from hvd_estimators.loading.batching import Chunk, cut_chunks
from hvd_estimators.loading.readers import DataModule


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
    yield from cut_chunks([columns], sizes)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 5, 3], [2, 1, 0, 0], [7]])
def test_batches_are_those_of_the_runs(sizes: list[int]) -> None:
    expected = [batch for run in runs(sizes) for batch in run.batches()]
    rows = sizes[0] if len(set(sizes)) == 1 else None
    dataset = column_dataset(lambda: runs(sizes), next(runs(sizes)), rows)
    assert {shape[0] for shape in map(tuple, _shapes(dataset))} == {rows}
    for _ in range(2):
        found = list(dataset)
        assert len(found) == len(expected)
        for batch, columns in zip(found, expected, strict=True):
            assert set(batch) == set(columns)
            for name, array in columns.items():
                np.testing.assert_array_equal(batch[name].numpy(), array)


def _shapes(dataset: tf.data.Dataset) -> list[Any]:
    return [spec.shape for spec in keras.tree.flatten(dataset.element_spec)]


class OwnModule(DataModule):
    """A user's own: gives batches only."""

    def train_data(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield from ({"x": np.full(2, n, np.float64)} for n in range(3))

    def val_data(self) -> Iterator[dict[str, np.ndarray]]:
        yield from ({"x": np.full(rows, 7.0)} for rows in (2, 1))


def test_a_users_data_module_trains_without_end_and_validates_again_and_again() -> None:
    datasets = ColumnDatasets(OwnModule(train_dir="", val_dir=""), prefetch=1)
    train = [int(batch["x"][0]) for batch in datasets.train().take(5)]
    assert train == [0, 1, 2, 0, 1]
    validation = datasets.validation(steps=9)
    for _ in range(2):
        assert [len(batch["x"]) for batch in validation] == [2, 1]
    assert len(list(datasets.validation(steps=1))) == 1


def test_columns_take_the_models_shapes_and_types() -> None:
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
    # In NumPy, as the driver and transform() do it, the same comes out.
    for a, b in zip(
        keras.tree.flatten(tensors.arrays({k: v[:3] for k, v in columns.items()})),
        keras.tree.flatten((x, y, weight)),
        strict=True,
    ):
        assert a.dtype == b.dtype.as_numpy_dtype
        np.testing.assert_array_equal(a, b)
