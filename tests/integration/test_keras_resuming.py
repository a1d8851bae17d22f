"""Keras runs resumed at any epoch are bit-for-bit identical to uninterrupted ones."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import make_estimator
from rank_pool import StandingBackend, shared_ranks
from reference import WIDTH, write_rows
from resuming import AskedToEnd, kept_checkpoints
from saved_checkpoints import read_state

from hvd_estimators.compat.callbacks import LearningRateWarmupCallback

pytestmark = pytest.mark.integration


class Draws(keras.layers.Layer):
    """Layer with noise from Keras and NumPy; the number of draws depends on the batch."""

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
    """Callback with unusual state: a deque, a counter and a float type unknown to JSON."""

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


class Batches(keras.callbacks.Callback):
    """Callback with per-rank state that restarts in each epoch; sets the rate by steps."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.mean = 0.0
        self.model.optimizer.learning_rate = 0.05

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches: list[int] = []
        # A second call for the same epoch would change the result.
        self.model.optimizer.learning_rate *= 0.9

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)
        self.mean = (self.mean + logs["loss"]) / 2

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["own"], logs["batches"] = self.mean, len(self.batches)


class Largest(keras.metrics.Metric):
    """Metric with a state that is not summed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.largest = self.add_weight(initializer="zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def merge_state(self, metrics: Any) -> None:
        for metric in metrics:
            self.largest.assign(tf.maximum(self.largest, metric.largest))

    def result(self) -> Any:
        return self.largest


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


@pytest.mark.soak
def test_a_run_resumes_from_each_epoch(
    backend: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    whole = run(store, backend, "whole", 6)
    # The first epoch is the best, and three more do not improve on it.
    assert len(whole[0]["loss"]) == 4
    assert len(set(whole[0]["learning_rate"])) > 1
    for epochs in (1, 2):
        run(store, backend, "parts", epochs)
    # The damaged epoch is trained once more, from the previous checkpoint.
    Path(store.get_checkpoints("parts")[-1]).write_bytes(b"damaged")
    for epochs in (2, 3, 6):
        parts = run(store, backend, "parts", epochs)
    assert_equal_bits(parts, whole)
    # The run has stopped: no epoch is trained, and the best weights are returned again.
    with caplog.at_level(logging.WARNING):
        assert_equal_bits(run(store, backend, "parts", 9), whole)
    assert "a callback stopped the run 'parts' after 4 epochs" in caplog.text
    assert {row.state for row in store.list_runs()} == {"finished"}
    assert store.load_history("parts").equals(store.load_history("whole"))
    # The callback stops the run again, after one more epoch.
    assert len(run(store, backend, "parts", 9, resume_stopped=True)[0]["loss"]) == 5
    first, second = whole[3]
    assert not np.array_equal(first["keras"][0], second["keras"][0])


def with_callbacks() -> dict[str, Any]:
    return {
        "callbacks": [Batches(), Counting(), LearningRateWarmupCallback(warmup_epochs=1.5)],
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "data_module": "arrow",
        "metrics": ["mae", Largest(name="largest")],
        "terminate_on_nan": True,
    }


def with_passes() -> dict[str, Any]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    return {
        "callbacks": [],
        # Eight batches form three steps, the last one of the remaining two batches.
        "backward_passes_per_step": 3,
        "batch_size": 7,
        "optimizer": keras.optimizers.Adam(rate, use_ema=True, weight_decay=0.01),
    }


def scaled() -> dict[str, Any]:
    net = make_net()
    net.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
    inner = keras.optimizers.SGD(0.02, gradient_accumulation_steps=3)
    return {
        "model": net,
        "callbacks": [Batches()],
        "batch_size": 7,
        "optimizer": keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=2.0**40, dynamic_growth_steps=2
        ),
    }


@pytest.mark.soak
@pytest.mark.parametrize(
    ("every", "make_params"),
    [(3, with_callbacks), (1, with_passes), (4, scaled)],
)
def test_a_run_resumes_within_epochs(
    backend: Any, store: Any, every: int, make_params: Callable[[], dict[str, Any]]
) -> None:
    write_rows(Path(store.get_train_data_path()), 107)
    write_rows(Path(store.get_val_data_path()), 30, seed=1)
    whole = run(store, backend, "whole", 2, **make_params())

    def run_again(run_id: str, backend: Any = backend, **more: Any) -> list[Any]:
        params = {**make_params(), "checkpoint_every_n_steps": every, **more}
        return run(store, backend, run_id, 2, **params)

    assert_equal_bits(run_again("kept", keep_checkpoints=99), whole)
    positions = []
    for run_id, position in kept_checkpoints(store, "kept"):
        positions.append(position)
        assert_equal_bits(run_again(run_id), whole)
    assert {epoch for epoch, rows in positions if rows} == {0, 1}, positions


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
