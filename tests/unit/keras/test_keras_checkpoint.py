"""Contents of mid-epoch Keras checkpoints, and resuming within an epoch."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.checkpoint import (
    PartialEpoch,
    _restore_metrics,
    build_metrics,
    metric_states,
)
from hvd_estimators.keras.loop import (
    NotFinite,
    RankCallbacks,
    StatisticsCallback,
    StreamsCallback,
)
from hvd_estimators.keras.shard_state import MicroBatches, RandomStreams
from hvd_estimators.keras.user_callbacks import CallbackStates, ScalarState
from hvd_estimators.training.run_state import decode, encode

SPEC = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1)))


class Own(keras.callbacks.Callback):
    def __init__(self, seen: list[float], best: float) -> None:
        super().__init__()
        self.seen = seen
        self.best = best
        self.weights = np.full(10_000, best)


def made(**compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae", "auc"], **compiled)
    return model


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_metrics_are_built_without_a_step(run_eagerly: bool) -> None:
    stepped, model = made(), made(run_eagerly=run_eagerly)
    x, y = np.ones((4, 3), "f"), np.ones((4, 1), "f")
    stepped.train_on_batch(x, y)
    weights = model.get_weights()
    build_metrics(model, SPEC, len(stepped.metrics_variables))
    shapes = [v.shape for v in stepped.metrics_variables]
    assert [v.shape for v in model.metrics_variables] == shapes
    assert not any(v.numpy().any() for v in model.metrics_variables)
    np.testing.assert_equal(model.get_weights(), weights)
    assert int(model.optimizer.iterations) == 0


def test_metrics_resume_on_fewer_or_more_ranks() -> None:
    model = made()
    build_metrics(model, SPEC, 99)
    rng = np.random.default_rng(0)
    of_ranks = [[rng.random(v.shape) for v in model.metrics_variables] for _ in range(4)]
    for size in (1, 2, 3, 4, 6):
        total = [np.zeros(v.shape) for v in model.metrics_variables]
        for rank in range(size):
            model.reset_metrics()
            _restore_metrics(model, of_ranks, rank, size)
            total = [a + b for a, b in zip(total, metric_states(model), strict=True)]
        for found, expected in zip(total, map(sum, zip(*of_ranks, strict=True)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_callback_state_is_restored_per_rank() -> None:
    ranks = [Own([1.0, 2.0], 0.5), Own([3.0], 0.5)]
    states = [CallbackStates([callback], {}, rank, 2) for rank, callback in enumerate(ranks)]
    # Large arrays come from rank 0.
    ranks[1].weights[:] = 7.0
    arrays: list[Any] = []
    document = encode(states[0].parts([state.own() for state in states]), arrays)
    parts = decode(document, arrays)
    assert parts["callbacks_of_ranks"] == [[{}], [{"seen": [3.0]}]]
    for rank, seen in enumerate(([1.0, 2.0], [3.0])):
        anew = Own([], 0.0)
        restored = CallbackStates([anew], parts, rank, 2)
        restored.restore()
        assert (anew.seen, anew.best, anew.weights[0]) == (seen, 0.5, 0.5)
        # Later changes do not affect a second restore.
        anew.seen.append(9.0)
        restored.restore()
        assert anew.seen == seen
    alone = Own([], 0.0)
    CallbackStates([alone], parts, 0, 1).restore()
    assert alone.seen == [1.0, 2.0]


def test_scalars_set_by_callbacks_are_restored() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    scalars = ScalarState(model)
    model.optimizer.learning_rate = 5.0
    model.optimizer.dynamic_scale.assign(3.0)
    scalars.restore()
    assert float(inner.learning_rate) == pytest.approx(0.1)
    assert float(model.optimizer.dynamic_scale) == 2.0**15


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    model = made()
    looks = NotFinite(model)
    assert looks.after_step({"loss": tf.constant(1.0)}) == (None, [])
    loss, names = looks.after_step({"loss": tf.constant(value)})
    np.testing.assert_equal((loss, names), (value, []))
    kernel, bias = model.trainable_variables
    kernel.assign([[0.0], [value], [0.0]])
    assert looks.after_step({}) == (None, [kernel.path])
    # The sum of these values overflows.
    kernel.assign(np.full((3, 1), np.finfo("f").max))
    bias.assign([np.finfo("f").max])
    assert looks.after_step({}) == (None, [])


class Stopped(Exception):
    pass


class Steps:
    """Callback that captures a run after a step and stops there."""

    checks_nan = False

    def __init__(self, model: keras.Model, streams: RandomStreams, shards: MicroBatches) -> None:
        self.model, self.streams, self.shards = model, streams, shards
        self.stop_after = 0
        self.saved: dict[str, Any] = {}

    def end(self, epoch: int, before: int, batches: int) -> None:
        if batches != self.stop_after:
            return
        values = [variable.numpy() for variable in self.shards.variables.variables]
        partial = {
            "metrics": [metric_states(self.model)],
            "variables": [dict(enumerate(values))],
            "digests": [b"digest"],
            "bases": {0: 3.0},
            "stop": True,
        }
        self.saved = {
            "variables": [
                variable.numpy()
                for variable in (*self.model.variables, *self.model.optimizer.variables)
            ],
            "state": SimpleNamespace(parts={"partial": partial}, random=[self.streams.capture()]),
        }
        raise Stopped


class End(keras.callbacks.Callback):
    stop = False

    def training_ended(self) -> None:
        """Do nothing: no log shows the learning rate."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs = dict(logs)

    def resume_epoch(self, stop: bool) -> None:
        self.stop = stop


def test_an_epoch_resumes_bit_for_bit_after_its_second_step() -> None:
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3) / 10

    def train(stop_after: int, saved: dict[str, Any] | None = None) -> tuple[Any, ...]:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        streams = RandomStreams(model, 5, 0)
        shards = MicroBatches(model, 1, 0, 1, streams)
        steps, end, resumed = Steps(model, streams, shards), End(), None
        steps.stop_after = stop_after
        statistics = StatisticsCallback(shards.shards, {})
        data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(2)
        if saved is not None:
            variables = [*model.variables, *model.optimizer.variables]
            for variable, value in zip(variables, saved["variables"], strict=True):
                variable.assign(value)
            resumed = PartialEpoch(model, saved["state"], shards, 2, 0, 1, streams.restore)
            resumed.build(data.element_spec)
            data = data.skip(2).apply(
                tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            )
        starts = StreamsCallback(streams, shards.shards)
        callbacks = RankCallbacks(
            [starts, statistics], end, model, 1, 4, shards, statistics, steps, resumed
        )
        with contextlib.suppress(Stopped):
            model.fit(data, steps_per_epoch=4, shuffle=False, verbose=0, callbacks=callbacks)
        return steps.saved, model, end, statistics

    _, expected, whole, _ = train(0)
    saved, *_ = train(2)
    _, model, end, statistics = train(0, saved)
    for found, variable in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(found, variable)
    assert end.logs == whole.logs
    assert (end.stop, whole.stop) == (True, False)
    assert (statistics.digests, statistics.bases) == ([b"digest"], {0: 3.0})
