"""Keras ranks that SIGTERM or a NaN ends, and runs resumed within an epoch, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import make_estimator
from rank_pool import StandingBackend, shared_ranks
from reference import WIDTH, write_rows
from resuming import AskedToEnd
from saved_checkpoints import read_state

pytestmark = pytest.mark.integration


class Draws(keras.layers.Layer):
    """Layer with noise from Keras and NumPy; the number of draws depends on the batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own = keras.random.SeedGenerator(5)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        count = 1 + tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))
        from_numpy = tf.py_function(lambda n: np.random.rand(int(n)).sum(), [count], tf.float32)
        ours = tf.reduce_sum(keras.random.normal((count,), seed=self.own))
        others = tf.reduce_sum(keras.random.normal((count,)))
        return x + 0.01 * (tf.reshape(from_numpy, ()) + ours + others)


class Counting(keras.callbacks.Callback):
    """Callback with a list, a dict and a float type unknown to JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[float] = []
        self.seen = {"epochs": 0}
        self.lowest = np.float32(np.inf)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.last.append(logs["val_loss"])
        self.seen["epochs"] += 1
        self.lowest = np.minimum(self.lowest, np.float32(logs["loss"]))
        logs["told"] = sum(self.last[-2:]) + self.seen["epochs"] + float(self.lowest)


def make_net() -> keras.Model:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(8, activation="tanh")(Draws()(inputs))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(hidden))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def run(store: Any, backend: Any, run_id: str, epochs: int, **params: Any) -> list[Any]:
    """Run a fit, and return its complete final state."""
    given = {
        "backend": backend,
        "model": make_net(),
        "optimizer": keras.optimizers.Adam(0.05),
        "batch_size": 16,
        "epochs": epochs,
        "run_id": run_id,
        "validation": 0.1,
        "shuffle": True,
        "scale_learning_rate": True,
        "callbacks": [
            Counting(),
            # Reduces the rate in each epoch; stops after some epochs without much progress.
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=1e9),
            keras.callbacks.EarlyStopping(
                patience=3, min_delta=1e9, restore_best_weights=True, monitor="val_loss"
            ),
        ],
    }
    fitted = make_estimator(store, 2, **{**given, **params}).fit_on_parquet()
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
def backend() -> StandingBackend:
    return shared_ranks(2, "tensorflow")


class Explodes(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations == 5:
            self.model.optimizer.learning_rate = 3e38


def test_all_ranks_end_after_sigterm_or_nan(backend: Any, store: Any) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    params = {"callbacks": [Counting()], "batch_size": 8}
    whole = run(store, backend, "whole", 2, **params)
    # Ranks check after their first step, and later ones.
    stopped = [(0, 0)]
    for after in (1, 3, 2):
        with pytest.raises(AssertionError, match="TrainingInterruptedError: The ranks were asked"):
            run(store, AskedToEnd(backend, after), "asked", 2, **params)
        state = read_state(store, store.get_checkpoints("asked")[-1])
        stopped.append((state.epoch, state.rows))
    assert stopped[1] == (0, 16)
    assert stopped == sorted(set(stopped))
    assert_equal_bits(run(store, backend, "asked", 2, **params), whole)

    params["callbacks"] = [Explodes(), keras.callbacks.TerminateOnNaN(raise_error=True)]
    params |= {"terminate_on_nan": True, "checkpoint_every_n_steps": 1}
    sgd = keras.optimizers.SGD(0.01)
    with pytest.raises(AssertionError, match=r"(?s)NotFiniteError.* at step 6 of the run .*dense"):
        run(store, backend, "nan", 2, optimizer=sgd, **params)
    # After the fifth of seven steps.
    assert store.get_checkpoints("nan")[-1].endswith("-000000-80.ckpt")


def test_a_shard_with_fewer_batches_than_steps_does_not_yield_nan(backend: Any, store: Any) -> None:
    # Four steps, but one shard has rows for only three.
    write_rows(Path(store.get_train_data_path()), 7)
    params: dict[str, Any] = {"batch_size": 1, "validation": None, "callbacks": []}

    def fitted(run_id: str, **more: Any) -> list[Any]:
        keras.utils.set_random_seed(7)
        # Batch normalization would need a row on every rank.
        net = keras.Sequential([keras.Input((WIDTH,)), Draws(), keras.layers.Dense(1)])
        return run(store, backend, run_id, 2, model=net, **params, **more)[:3]

    expected = fitted("plain")
    found = fitted("careful", terminate_on_nan=True, checkpoint_every_n_steps=1)
    assert_equal_bits(found, expected)
    assert all(np.isfinite(weights).all() for weights in expected[1])
