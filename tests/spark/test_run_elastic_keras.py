"""A Keras program under `run_elastic`, with Horovod's own callbacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_estimators import run_elastic
from hvd_estimators.compat.elastic import KerasState
from hvd_estimators.exceptions import ParamError

pytestmark = [pytest.mark.spark, pytest.mark.once]

EPOCHS, STEPS, RATE, MOMENTUM = 4, 2, 0.1, 0.9


def rows_of(rank: int) -> tuple[Any, Any]:
    """Return a rank's rows, two batches of four."""
    x = np.random.default_rng(rank).random((4 * STEPS, 2), np.float32)
    return x, x.sum(1, keepdims=True)


def trained_by_numpy(num_ranks: int) -> Any:
    """Return the weights of a linear model after gradient descent with momentum."""
    weights, velocity = np.zeros((2, 1)), np.zeros((2, 1))
    for _ in range(EPOCHS):
        for step in range(STEPS):
            part = slice(4 * step, 4 * step + 4)
            x = np.concatenate([rows_of(rank)[0][part] for rank in range(num_ranks)])
            y = np.concatenate([rows_of(rank)[1][part] for rank in range(num_ranks)])
            gradient = 2 * x.T @ (x @ weights - y) / len(x)
            velocity = MOMENTUM * velocity - RATE * gradient
            weights = weights + velocity
    return weights


def train(folder: str) -> Any:
    import horovod.tensorflow.keras as hvd
    import keras

    from hvd_estimators.compat.elastic import KerasState
    from hvd_estimators.keras import DistributedOptimizer

    hvd.init()
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((2,)), dense])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM))
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = rows_of(hvd.rank())
    starts: list[int] = []

    class Fail(keras.callbacks.Callback):  # type: ignore[misc]
        """End rank 1 in the middle of the third epoch, once."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            marker = Path(folder, "failed")
            if hvd.rank() == 1 and state.epoch == 2 and not marker.exists():
                marker.touch()
                os._exit(3)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def fit(state: Any) -> None:
        starts.append(state.epoch)
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            Fail(),
        ]
        options = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(x, y, epochs=EPOCHS - state.epoch, **options)

    state = KerasState(model, epoch=0)
    fit(state)
    return state.epoch, starts, model.get_weights()[0]


@pytest.mark.soak
def test_a_keras_program_resumes_exactly_from_its_last_commit(spark: Any, tmp_path: Path) -> None:
    for epoch, starts, weights in run_elastic(train, (str(tmp_path),), num_proc=2):
        assert (epoch, starts) == (EPOCHS, [2])
        np.testing.assert_allclose(weights, trained_by_numpy(2), rtol=1e-5)


def test_a_state_needs_weights_and_an_optimizer() -> None:
    with pytest.raises(ParamError, match=r"model: expected one that is built.*model\.build"):
        KerasState(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ParamError, match="optimizer: expected one"):
        KerasState(model)
