"""A Keras run that is resumed at any epoch ends as an uninterrupted one, bit by bit."""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import keras_reference
import lightning_ranks
import numpy as np
import pytest
import reference
import tensorflow as tf
from keras_reference import make_estimator
from lightning_ranks import StandingBackend
from reference import WIDTH, write_rows

from hvd_estimators.training.state import read_state

pytestmark = pytest.mark.integration


class Draws(keras.layers.Layer):
    """Adds noise, of which it draws as much as its batch says, from Keras and from NumPy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own = keras.random.SeedGenerator(5)
        self.tensorflow = tf.random.Generator.from_seed(5)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        count = 1 + tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))
        from_numpy = tf.py_function(lambda n: np.random.rand(int(n)).sum(), [count], tf.float32)
        ours = tf.reduce_sum(keras.random.normal((count,), seed=self.own))
        others = tf.reduce_sum(self.tensorflow.normal((count,)))
        return x + 0.01 * (tf.reshape(from_numpy, ()) + ours + others)


class Counting(keras.callbacks.Callback):
    """Has state of its own kinds: a deque, a counter, a type of floats that JSON does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = collections.deque(maxlen=2)
        self.seen: Any = collections.Counter()
        self.lowest = np.float32(np.inf)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.last.append(logs["val_loss"])
        self.seen.update(["epochs"])
        self.lowest = np.minimum(self.lowest, np.float32(logs["loss"]))
        logs["told"] = sum(self.last) + self.seen["epochs"] + float(self.lowest)


def make_net() -> keras.Model:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(8, activation="tanh")(Draws()(inputs))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(hidden))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def run(store: Any, backend: Any, run_id: str, epochs: int, **params: Any) -> list[Any]:
    """Return all that a run has ended with."""
    fitted = make_estimator(
        store,
        2,
        backend=backend,
        model=make_net(),
        optimizer=keras.optimizers.Adam(0.05),
        batch_size=16,
        epochs=epochs,
        run_id=run_id,
        validation=0.1,
        shuffle=True,
        scale_learning_rate=True,
        callbacks=[
            Counting(),
            # Reduces with every epoch; stops after some without much progress.
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=1e9),
            keras.callbacks.EarlyStopping(
                patience=3, min_delta=1e9, restore_best_weights=True, monitor="val_loss"
            ),
        ],
        **params,
    ).fit_on_parquet()
    model = fitted.getModel()
    state = read_state(store, store.get_checkpoints(run_id)[-1])
    weights = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
    history = [vars(record) for record in state.history]
    return [fitted.getHistory(), weights, history, state.random, state.parts]


def assert_equal_bits(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_equal_bits(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal_bits(a, b)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[StandingBackend]:
    for module in (reference, keras_reference, lightning_ranks, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    with StandingBackend(2, tmp_path / "ranks", "tensorflow") as standing:
        yield standing


def test_a_run_goes_on_from_each_epoch(
    backend: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    whole = run(store, backend, "whole", 6)
    # The first epoch is the best; three more do not better it.
    assert len(whole[0]["loss"]) == 4
    assert len(set(whole[0]["learning_rate"])) > 1
    for epochs in (1, 2):
        run(store, backend, "parts", epochs)
    # Damaged: its epoch is trained once more, from the checkpoint before.
    Path(store.get_checkpoints("parts")[-1]).write_bytes(b"damaged")
    for epochs in (2, 3, 6):
        parts = run(store, backend, "parts", epochs)
    assert_equal_bits(parts, whole)
    # It has stopped: nothing is trained, and the best weights are what is returned again.
    with caplog.at_level(logging.WARNING):
        assert_equal_bits(run(store, backend, "parts", 9), whole)
    assert "a callback had stopped the run 'parts' after 4 epochs" in caplog.text
    assert {row.state for row in store.list_runs()} == {"finished"}
    assert store.load_history("parts").equals(store.load_history("whole"))
    # What has stopped it does so again, when it has seen one more epoch.
    assert len(run(store, backend, "parts", 9, resume_stopped=True)[0]["loss"]) == 5
    first, second = whole[3]
    assert not np.array_equal(first["keras"][0], second["keras"][0])
