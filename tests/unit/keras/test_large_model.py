"""Large Keras models, whose weights stay in a memory-mapped file."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.keras import serialization
from hvd_estimators.keras.large_model import unwritten_zeros
from hvd_estimators.keras.serialization import (
    ModelPayload,
    copy_model,
    dump_model,
    load_model,
    model_payload,
)
from hvd_estimators.keras.tensors import kept_variables

layers = keras.layers
# A square matrix of this width is large enough to be mapped.
UNITS = 256


@keras.saving.register_keras_serializable("test_keras_mapped")
class Tower(keras.Model):
    """Model of layers of one shape, which differ only in names and positions."""

    def __init__(self, depth: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth = depth
        self.blocks = [layers.Dense(UNITS, activation="relu") for _ in range(depth)]
        self.first = layers.Dense(UNITS)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "depth": self.depth}

    def call(self, x: Any) -> Any:
        # Not in the order of creation.
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return x


@keras.saving.register_keras_serializable("test_keras_mapped")
class Scaled(layers.Layer):
    """Layer that loads more than its variables."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], UNITS), name="kernel")
        self.factor = 1.0

    def call(self, x: Any) -> Any:
        return self.factor * keras.ops.matmul(x, self.kernel)

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        self.factor = float(np.asarray(store["0"])[0, 0])


@keras.saving.register_keras_serializable("test_keras_mapped")
class NoConfig(keras.Model):
    """Model with an argument missing from its config."""

    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.units = units
        self.inner = layers.Dense(units)

    def call(self, x: Any) -> Any:
        return self.inner(x)


def sequential(*made: Any) -> keras.Model:
    return keras.Sequential([keras.Input((UNITS,)), *made])


def sequence() -> keras.Model:
    inputs = keras.Input((4, UNITS))
    attended = layers.MultiHeadAttention(2, 64)(inputs, inputs)
    x = layers.LayerNormalization()(attended + inputs)
    x = layers.Bidirectional(layers.GRU(64, recurrent_dropout=0.1))(x)
    return keras.Model(inputs, [layers.Dense(3)(x), x])


def shared() -> keras.Model:
    inputs = keras.Input((UNITS,))
    layer = layers.Dense(UNITS, kernel_initializer="orthogonal")
    return keras.Model(inputs, layer(keras.ops.tanh(layer(inputs))))


def mixed() -> keras.Model:
    return sequential(
        layers.Dense(UNITS, dtype="mixed_bfloat16"),
        layers.Dense(UNITS, dtype="bfloat16"),
        layers.Dense(UNITS, dtype="float64"),
    )


def normalized() -> keras.Model:
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(3, 2, (20, UNITS)))
    return sequential(layer, layers.Dense(UNITS))


def with_lora() -> keras.Model:
    model = sequential(layers.Dense(UNITS))
    model.layers[0].enable_lora(2)
    return model


def built(model: keras.Model) -> keras.Model:
    model(np.zeros((1, UNITS)))
    return model


MAPPED: dict[str, Callable[[], keras.Model]] = {
    "functional": shared,
    "sequence": sequence,
    "subclass": lambda: built(Tower()),
    "nested": lambda: sequential(built(Tower(2)), layers.BatchNormalization(), layers.Dropout(0.5)),
    "types": mixed,
    "no config": lambda: built(NoConfig(UNITS)),
}
PLAIN: dict[str, Callable[[], keras.Model]] = {
    "normalization": normalized,
    "own loading": lambda: sequential(Scaled()),
    "lora": with_lora,
}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "_LARGE_BYTES", 0)


def with_random_weights(model: keras.Model) -> keras.Model:
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, 0.1, variable.shape))
    return model


def rows(model: keras.Model) -> Any:
    shape = getattr(model, "input_shape", None) or (None, UNITS)
    return np.random.default_rng(2).normal(size=(7, *shape[1:])).astype(np.float32)


def assert_alike(copy: keras.Model, model: keras.Model) -> None:
    assert len(copy.weights) == len(model.weights)
    for ours, theirs in zip(copy.weights, model.weights, strict=True):
        assert ours.path == theirs.path
        assert keras.ops.convert_to_numpy(ours).tobytes() == (
            keras.ops.convert_to_numpy(theirs).tobytes()
        )
    found, expected = (m.predict_on_batch(rows(m)) for m in (copy, model))
    for a, b in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("kind", MAPPED)
def test_plain_models_are_mapped(spark: Any, kind: str) -> None:
    model = with_random_weights(MAPPED[kind]())
    python, numpy = random.getstate(), np.random.get_state()
    document = model_payload(model)
    assert isinstance(document, LocalFile)
    # Loading draws no numbers from the user's generators.
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy[1])
    for copy in (
        load_model(document, mapped=True),
        load_model(document),
        load_model(Path(document).read_bytes(), mapped=True),
    ):
        assert_alike(copy, model)
    copy = load_model(document, mapped=True)
    document.close()
    # Mapped weights outlive the file, and can be changed.
    copy.weights[0].assign(copy.weights[0] * 2)
    model.weights[0].assign(model.weights[0] * 2)
    assert_alike(copy, model)


@pytest.mark.parametrize("kind", PLAIN)
def test_other_models_are_loaded_by_keras(spark: Any, kind: str) -> None:
    model = with_random_weights(PLAIN[kind]())
    document = model_payload(model)
    assert isinstance(document, bytes)
    assert_alike(load_model(document, mapped=True), load_model(dump_model(model)))


def address(variable: Any) -> int:
    """Return the address of a variable's first byte."""
    value = np.asarray(memoryview(tf.convert_to_tensor(variable.value)))
    return int(value.__array_interface__["data"][0])


@pytest.mark.parametrize("changes", ["copy", "original"])
def test_copies_share_memory_until_a_model_changes(changes: str) -> None:
    model = with_random_weights(MAPPED["nested"]())
    weights = model.get_weights()
    copy = copy_model(model)
    assert_alike(copy, model)
    pairs = list(zip(copy.variables, model.variables, strict=True))
    assert all(address(ours) == address(theirs) for ours, theirs in pairs)
    with kept_variables(copy):
        copy.variables[0].assign(copy.variables[0] + 1)
    assert all(address(ours) == address(theirs) for ours, theirs in pairs)
    changed, other = (copy, model) if changes == "copy" else (model, copy)
    changed.compile("sgd", "mse")
    changed.fit(np.ones((4, UNITS)), np.ones((4, UNITS)), verbose=0)
    for before, now in zip(weights, other.get_weights(), strict=True):
        assert np.array_equal(before, now)
    assert not np.array_equal(weights[0], changed.get_weights()[0])


@pytest.mark.parametrize("kind", MAPPED)
def test_ranks_get_equal_models(kind: str) -> None:
    model = with_random_weights(MAPPED[kind]())
    model.compile(keras.optimizers.Adam(0.1), "mse")
    document = cloudpickle.dumps(ModelPayload(model))
    assert b"model.weights.h5" not in document
    received = pickle.loads(document).load()
    assert_alike(received, model)
    assert type(received.optimizer) is keras.optimizers.Adam
    for ours, theirs in zip(received.variables, model.variables, strict=True):
        # Including the states of random generators.
        assert np.array_equal(ours.numpy(), theirs.numpy())
        assert ours.trainable == theirs.trainable


def test_zero_slots_use_no_memory_until_written() -> None:
    kernel = keras.Variable(np.ones((2**11, 2**12), np.float32))
    size = 2**25
    made = {
        "zeros": keras.optimizers.Adam(0.1),
        "ones": keras.optimizers.Adagrad(0.1, initial_accumulator_value=1.0),
    }
    taken = {}
    for name, optimizer in made.items():
        before = anonymous_bytes()
        with unwritten_zeros():
            optimizer.build([kernel])
        taken[name] = anonymous_bytes() - before
    assert taken["zeros"] < size / 4
    assert taken["ones"] > size * 3 / 4
    expected = keras.optimizers.Adam(0.1)
    other = keras.Variable(kernel)
    expected.apply([np.full(other.shape, 0.5, np.float32)], [other])
    made["zeros"].apply([np.full(kernel.shape, 0.5, np.float32)])
    assert np.array_equal(kernel, other)
    assert np.asarray(made["ones"].variables[-1]).min() == 1.0


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_weights_are_read_at_first_use(spark: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), layers.Embedding(2**18, 128), layers.Flatten()])
    size = 2**27
    document = model_payload(model)
    few, many = np.array([[5.0], [2**18 - 1.0]]), np.arange(0.0, 2**18, 8)[:, None]
    copy = load_model(document, mapped=True)
    assert np.array_equal(copy.predict_on_batch(few), model.predict_on_batch(few))
    # A copy would have read all pages.
    assert mapped_bytes(document) < size / 4
    # Each page has eight rows.
    assert np.array_equal(copy.predict_on_batch(many), model.predict_on_batch(many))
    assert mapped_bytes(document) > size / 2


def mapped_bytes(document: LocalFile) -> int:
    """Return the number of bytes of a file mapped into this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.endswith(document.path))
    return next(int(line.split()[1]) * 1024 for line in lines[place:] if line.startswith("Rss:"))
