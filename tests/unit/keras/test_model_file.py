"""Snapshots of a Keras model, written while the model keeps training."""

from __future__ import annotations

import io
import threading
from typing import Any

import keras
import numpy as np
import pytest
from variants import others_in_soak

from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.keras.model_file import load_weights, snapshot


@keras.saving.register_keras_serializable("copies")
class Counting(keras.layers.Layer):
    """Layer that saves state outside of variables."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = np.zeros(1)

    def call(self, x: Any) -> Any:
        self.count += 1  # during tracing
        return x

    def load_own_variables(self, store: Any) -> None:
        self.count = np.array(store["count"])

    def save_own_variables(self, store: Any) -> None:
        store["count"] = self.count


class WithFiles(keras.layers.Identity):
    def save_assets(self, dir_path: str) -> None:
        raise AssertionError


class Plain(keras.Model):
    """Model without a config."""

    def __init__(self, net: keras.Model) -> None:
        super().__init__()
        self.net = net

    def call(self, x: Any, training: bool = False) -> Any:
        return self.net(x, training=training)


def network(kind: str) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers: list[Any] = [
        keras.layers.Dense(4, dtype="mixed_bfloat16" if kind == "mixed" else None),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=3),
        keras.layers.Dense(1, dtype="float32"),
    ]
    if kind in ("own", "files"):
        layers.insert(0, Counting() if kind == "own" else WithFiles())
    model: keras.Model = keras.Sequential([keras.Input((3,)), *layers])
    if kind == "subclass":
        model = Plain(model)
    rate: Any = 0.01
    if kind == "schedule":
        rate = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
    optimizer: Any = keras.optimizers.Adam(rate, use_ema=kind == "mixed")
    if kind == "mixed":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model


def values(model: keras.Model) -> list[Any]:
    kept = [*model.variables]
    for optimizer in model_optimizers(model):
        kept += optimizer.variables
    # Metrics start over with each epoch; their states are saved separately.
    measured = {id(v) for v in model.metrics_variables}
    own = [layer.count.copy() for layer in model.layers if isinstance(layer, Counting)]
    # Nor does Keras save its generators of random numbers.
    kept = [v for v in kept if id(v) not in measured and "seed_generator" not in v.path]
    return [*(np.array(v.numpy()) for v in kept), *own]


@pytest.mark.parametrize("kind", others_in_soak("mixed", "plain", "schedule", "subclass", "own"))
def test_another_thread_writes_the_snapshot_during_training(kind: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype("f"), rng.normal(size=(8, 1)).astype("f")
    model, again = network(kind), network(kind)
    for _ in range(2):
        model.train_on_batch(x, y)
    before, made = values(model), snapshot(model)
    assert made is not None
    errors: list[BaseException] = []
    file = io.BytesIO()

    def write() -> None:
        try:
            for _ in range(3):  # while the model trains, as far as two threads overlap
                file.seek(0)
                file.truncate()
                made.save(file)
        except BaseException as error:
            errors.append(error)

    model.train_on_batch(x, y)
    for layer in model.layers:
        if isinstance(layer, Counting):
            layer.count += 5
    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        model.train_on_batch(x, y)
    thread.join()
    assert not errors
    # The model kept training, undisturbed by the other thread.
    assert not np.array_equal(values(model)[0], before[0])
    again.train_on_batch(x, y)
    file.seek(0)
    load_weights(again, file)
    assert len(values(again)) == len(before)
    for found, expected in zip(values(again), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_models_with_layers_that_save_files_have_no_snapshot() -> None:
    assert snapshot(network("plain")) is not None
    assert snapshot(network("own")) is not None
    assert snapshot(network("files")) is None
