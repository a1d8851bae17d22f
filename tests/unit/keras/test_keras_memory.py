"""Models sent to the ranks and back hold each variable once, outside of memory."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_estimators.keras.model_file import load_values, save_values
from hvd_estimators.keras.serialization import ModelPayload, copy_model

ROWS = 2**13
WEIGHTS = 4 * (ROWS * 64 + 64 + 1)
"""Bytes of the model's weights, mostly an embedding of 2 MiB."""

OVERHEAD = 2**17
"""Bytes of config, compile settings and file formats."""


def make_model(trained: bool) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((1,), name="x")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 64)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(embedded))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    model.optimizer.build(model.trainable_variables)
    if trained:
        # An update of the whole table, as from a regularizer.
        gradients = [np.full(v.shape, 0.5, "float32") for v in model.trainable_variables]
        model.optimizer.apply(gradients)
    return model


def variables(model: keras.Model) -> list[np.ndarray[Any, Any]]:
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def assert_same(model: keras.Model, expected: list[np.ndarray[Any, Any]]) -> None:
    for found, value in zip(variables(model), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def peak(function: Callable[[], Any]) -> int:
    """Return the peak memory of Python and NumPy in bytes while a function runs."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_serialization_needs_little_memory(tmp_path: Path) -> None:
    model = make_model(trained=True)
    expected = variables(model)
    path = tmp_path / "call"

    def put() -> None:
        with open(path, "wb") as file:
            cloudpickle.dump(ModelPayload(model), file)

    # Keras and TensorFlow hold up to three copies of the variable they read or write. A file
    # of all three states, also held in memory, would be two copies too many. The rest is
    # imports at first use.
    most = 4 * WEIGHTS + 4 * OVERHEAD
    assert peak(put) < most
    with open(path, "rb") as file:
        document = pickle.load(file)
    received: list[keras.Model] = []
    assert peak(lambda: received.append(document.load())) < most
    assert_same(received[0], expected)

    checkpoint = str(tmp_path / "checkpoint")
    assert peak(lambda: save_values(model, checkpoint)) < most
    other = make_model(trained=False)
    assert peak(lambda: load_values(other, checkpoint)) < most
    assert_same(other, expected)


def test_checkpoints_hold_each_variable_once(tmp_path: Path) -> None:
    model = make_model(trained=True)
    path = tmp_path / "checkpoint"
    save_values(model, str(path))
    assert 3 * WEIGHTS < path.stat().st_size < 3 * WEIGHTS + OVERHEAD
    loaded = make_model(trained=False)
    load_values(loaded, str(path))
    assert_same(loaded, variables(model))


def test_saving_does_not_change_the_model_and_the_driver_reuses_it() -> None:
    model = make_model(trained=True)
    expected, optimizer = variables(model), model.optimizer
    copy = copy_model(model)
    assert not copy.compiled
    document = ModelPayload(model)
    cloudpickle.dumps(document)
    assert model.optimizer is optimizer
    assert model.compiled
    assert document.load() is model
    assert model.optimizer is optimizer
    assert_same(model, expected)
