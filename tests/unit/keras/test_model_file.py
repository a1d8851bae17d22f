"""Snapshots of a Keras model, written while the model keeps training."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from variants import others_in_soak

from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.keras.custom_objects import UnequalCopyError
from hvd_estimators.keras.model_file import ModelValues, load_values


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
    words = ""

    def save_assets(self, dir_path: str) -> None:
        (Path(dir_path) / "words.txt").write_text(self.words)

    def load_assets(self, dir_path: str) -> None:
        self.words = (Path(dir_path) / "words.txt").read_text()


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
    kept = [v for v in kept if id(v) not in measured]
    return [*(np.array(v.numpy()) for v in kept), *own]


@pytest.mark.parametrize("kind", others_in_soak("mixed", "plain", "schedule", "subclass", "own"))
def test_another_thread_writes_the_snapshot_during_training(kind: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype("f"), rng.normal(size=(8, 1)).astype("f")
    model, again = network(kind), network(kind)
    for _ in range(2):
        model.train_on_batch(x, y)
    before, made = values(model), ModelValues.of(model, copied=True)
    errors: list[BaseException] = []
    file = io.BytesIO()

    def write() -> None:
        try:
            for _ in range(3):  # while the model trains, as far as two threads overlap
                file.seek(0)
                file.truncate()
                made.write(file)
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
    load_values(again, file)
    assert len(values(again)) == len(before)
    for found, expected in zip(values(again), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_files_of_layers_are_restored() -> None:
    model, again = network("files"), network("files")
    model.layers[0].words = "a b"
    file = io.BytesIO()
    ModelValues.of(model).write(file)
    load_values(again, file)
    assert again.layers[0].words == "a b"


def test_values_of_other_models_are_rejected() -> None:
    file = io.BytesIO()
    ModelValues.of(network("plain")).write(file)
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    with pytest.raises(UnequalCopyError, match=r"has 9 variables, and a copy has 4; .*Batch"):
        load_values(wide, file)
    file = io.BytesIO()
    ModelValues.of(wide).write(file)
    other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    with pytest.raises(UnequalCopyError, match=r"kernel' has shape \(3, 4\).*in a copy, \(3, 5\)"):
        load_values(other, file)
