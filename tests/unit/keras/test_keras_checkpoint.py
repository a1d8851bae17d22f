"""Contents of mid-epoch Keras checkpoints."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.checkpoint import _restore_metrics, build_metrics
from hvd_estimators.keras.loop import NotFinite
from hvd_estimators.keras.metrics import capture_metrics
from hvd_estimators.keras.user_callbacks import CallbackStates, ScalarState
from hvd_estimators.training.run_state import decode, encode

BATCH = (tf.ones((2, 3)), tf.ones((2, 1)))


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


def test_metrics_resume_on_fewer_or_more_ranks() -> None:
    model = made()
    build_metrics(model, BATCH, 99)
    rng = np.random.default_rng(0)
    of_ranks = [[rng.random(v.shape) for v in model.metrics_variables] for _ in range(4)]
    for size in (1, 2, 3, 4, 6):
        total = [np.zeros(v.shape) for v in model.metrics_variables]
        for rank in range(size):
            model.reset_metrics()
            _restore_metrics(model, of_ranks, rank, size)
            total = [a + b for a, b in zip(total, capture_metrics(model), strict=True)]
        summed = map(sum, zip(*of_ranks, strict=True))
        for found, expected in zip(total, summed, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_callbacks_resume_from_the_state_of_rank_0() -> None:
    given = Own([], 0.0)
    states = CallbackStates([given])
    given.__init__([1.0, 2.0], 0.5)  # type: ignore[misc]
    arrays: list[Any] = []
    document = encode(states.capture(), arrays)
    anew = Own([], 0.0)
    restored = CallbackStates([anew], decode(document, arrays))
    restored.restore()
    assert (anew.seen, anew.best, anew.weights[0]) == ([1.0, 2.0], 0.5, 0.5)
    # Later changes do not affect a second restore.
    anew.seen.append(9.0)
    restored.restore()
    assert anew.seen == [1.0, 2.0]


def test_states_go_to_callbacks_of_their_class(caplog: pytest.LogCaptureFixture) -> None:
    stopping = keras.callbacks.EarlyStopping(patience=2)
    plateau = keras.callbacks.ReduceLROnPlateau(patience=3)
    states = CallbackStates([stopping, plateau, Own([], 0.0)])
    stopping.best, stopping.wait, plateau.best, plateau.wait = 0.2, 2, 0.3, 1
    captured = states.capture()

    first, second = Own([], 0.0), Own([], 0.0)
    other = keras.callbacks.ReduceLROnPlateau(patience=9)
    CallbackStates([first, other, second], captured).restore()
    # It has its counters, and what the user gave now.
    assert (other.best, other.wait, other.patience) == (0.3, 1, 9)
    assert vars(second).keys() == vars(first).keys()
    assert "callbacks: the run's checkpoint has states of EarlyStopping, which" in caplog.text


def test_what_a_callback_makes_of_its_arguments_is_its_state() -> None:
    given = Own([], 0.5)
    states = CallbackStates([given])
    given.seen = [1.0]
    captured = states.capture()
    anew = Own([], 0.7)
    resumed = CallbackStates([anew], captured)
    resumed.restore()
    assert (anew.seen, anew.best) == ([1.0], 0.7)
    # Also in the run's next part, in which nothing changes.
    assert resumed.capture()[0]["state"]["seen"] == [1.0]


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
