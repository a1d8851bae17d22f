"""Models with a custom compile() and train step: all of their optimizers average gradients."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import make_estimator, pooled_estimator
from rank_pool import shared_ranks
from reference import WIDTH, write_rows

from hvd_estimators.exceptions import ParamError

pytestmark = pytest.mark.integration


class Adversaries(keras.Model):
    """Two networks, two optimizers and no call(), as in Keras's guide."""

    def __init__(self, maker: keras.Model, judge: keras.Model) -> None:
        super().__init__()
        self.maker = maker
        self.judge = judge
        self.judge_loss = keras.metrics.Mean(name="judge_loss")

    def compile(self, judge_optimizer: Any, maker_optimizer: Any, loss: Any) -> None:
        super().compile()
        self.judge_optimizer = judge_optimizer
        self.maker_optimizer = maker_optimizer
        self.compare = loss

    @property
    def metrics(self) -> list[Any]:
        return [self.judge_loss]

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        real, noise = data
        with tf.GradientTape() as tape:
            rated = tf.concat([self.judge(self.maker(noise)), self.judge(real)], axis=0)
            wanted = tf.concat([tf.ones_like(noise), tf.zeros_like(noise)], axis=0)
            judge_loss = self.compare(wanted, rated)
        weights = self.judge.trainable_weights
        gradients = tape.gradient(judge_loss, weights)
        self.judge_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            rated = self.judge(self.maker(noise))
            maker_loss = self.compare(tf.zeros_like(noise), rated)
        weights = self.maker.trainable_weights
        gradients = tape.gradient(maker_loss, weights)
        self.maker_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.judge_loss.update_state(judge_loss, sample_weight=tf.shape(real)[0])
        return {"judge_loss": self.judge_loss.result()}


def make_adversaries() -> Adversaries:
    keras.utils.set_random_seed(4)
    model = Adversaries(
        keras.Sequential([keras.Input((1,)), keras.layers.Dense(WIDTH)]),
        keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)]),
    )
    model.compile(
        keras.optimizers.Adam(0.05),
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def test_both_optimizers_average_gradients(store: Any) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 120)
    params: dict[str, Any] = {"model": make_adversaries, "optimizer": None, "loss": None}
    estimator = pooled_estimator(store, 2, batch_size=30, epochs=3, run_id="pair", **params)
    fitted = estimator.fit_on_parquet()
    alone = make_adversaries()
    order = np.concatenate([np.r_[i : i + 30, 60 + i : 90 + i] for i in (0, 30)])
    expected = alone.fit(
        columns["features"][order],
        columns["label"][order, None],
        batch_size=60,
        epochs=3,
        shuffle=False,
        verbose=0,
    ).history
    trained = fitted.getModel()
    for part in ("maker", "judge"):
        for a, b in zip(getattr(trained, part).weights, getattr(alone, part).weights, strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=part)
    np.testing.assert_allclose(fitted.getHistory()["judge_loss"], expected["judge_loss"], rtol=1e-4)
    resumed = estimator.fit_on_parquet({estimator.epochs: 4})
    whole = estimator.fit_on_parquet({estimator.epochs: 4, estimator.run_id: "whole"})
    assert_equal_states(resumed.getModel(), whole.getModel())


class Dies(keras.callbacks.Callback):
    """Callback that kills rank 1 once, in the second epoch."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        due = (self.epoch, batch) == (1, 2) and os.environ["HOROVOD_RANK"] == "1"
        if due and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def assert_equal_states(found: Adversaries, expected: Adversaries) -> None:
    """Compare weights and the states of both optimizers bit for bit."""
    for part in ("maker", "judge", "maker_optimizer", "judge_optimizer"):
        ours, others = getattr(found, part).variables, getattr(expected, part).variables
        for a, b in zip(ours, others, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=f"{part}: {a.path}")
    # Two moments for each of the two weights, the iterations and the learning rate.
    assert len(found.judge_optimizer.variables) == 6


def test_a_killed_rank_loses_no_optimizers_state(store: Any, tmp_path: Path) -> None:
    write_rows(Path(store.get_train_data_path()), 120)
    marker = tmp_path / "died"

    def fit(run_id: str, **params: Any) -> Any:
        params |= {"model": make_adversaries, "optimizer": None, "loss": None}
        params |= {"batch_size": 15, "epochs": 2, "run_id": run_id}
        return make_estimator(store, 2, **params, checkpoint_every_n_steps=1).fit_on_parquet()

    whole = fit("whole", backend=shared_ranks(2, "tensorflow"))
    killed = fit("killed", max_restarts=1, callbacks=[Dies(str(marker))])
    assert marker.exists()
    assert killed.summary.restarts == 1
    assert_equal_states(killed.getModel(), whole.getModel())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"loss": "mse"}, r"own compile\(\).*leave optimizer, loss, .*found loss"),
        ({"model": make_adversaries()}, r"own compile\(\).* Set model to a function that makes"),
        ({"learning_rate": 0.1}, "learning_rate: it sets the rate of one optimizer"),
    ],
)
def test_params_that_need_the_models_own_compile_are_rejected(
    store: Any, params: dict[str, Any], message: str
) -> None:
    write_rows(Path(store.get_train_data_path()), 8)
    given = {"model": make_adversaries, "optimizer": None, "loss": None, **params}
    with pytest.raises(ParamError, match=message):
        pooled_estimator(store, 2, **given).fit_on_parquet()
