"""Which training steps of keras.io's guides allow several batches per step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_estimators.keras.own_step import why_one_batch_per_step


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )


class Stepping(keras.Model):
    """Model with a network, a second one, and a step of its own."""

    def __init__(self, step: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.step = step
        self.net, self.other = network(), network()
        self.critic_optimizer = keras.optimizers.Adam(0.01)
        self.tracker = keras.metrics.Mean(name="loss")

    def descend(self, x: Any, y: Any, optimizer: Any = None, net: Any = None) -> None:
        net = net or self.net
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, net.trainable_weights)
        (optimizer or self.optimizer).apply(gradients, net.trainable_weights)
        self.tracker.update_state(loss)

    def follow(self) -> None:
        for ours, others in zip(self.net.weights, self.other.weights, strict=True):
            others.assign(0.9 * others + 0.1 * ours)

    def train_step(self, data: Any) -> Any:
        self.step(self, *data)
        return {"loss": self.tracker.result()}


def once(model: Any, x: Any, y: Any) -> None:
    model.descend(x, y)


def gan(model: Any, x: Any, y: Any) -> None:
    model.descend(x, y, model.critic_optimizer, model.other)
    model.descend(x, y)


def wgan(model: Any, x: Any, y: Any) -> None:
    for _ in range(3):
        model.descend(x, y)


def every_second(model: Any, x: Any, y: Any) -> None:
    tf.cond(tf.reduce_sum(x) > 0, lambda: model.descend(x, y), lambda: None)


def target_network(model: Any, x: Any, y: Any) -> None:
    model.descend(x, y)
    model.follow()


def momentum_encoder(model: Any, x: Any, y: Any) -> None:
    model.follow()
    model.descend(x, y)


def frozen_target(model: Any, x: Any, y: Any) -> None:
    model.other.trainable = False
    target_network(model, x, y)


def numbers(model: Any, x: Any, y: Any) -> None:
    model.descend(x * float(np.mean(x.numpy())), y)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (once, None),
        (gan, "applies optimizers 2 times per batch"),
        (wgan, "applies optimizers 3 times per batch"),
        (every_second, "applies its optimizer in a condition or loop"),
        (target_network, "changes the variable 'sequential.*' in each batch"),
        (momentum_encoder, "changes the variable 'sequential.*' in each batch"),
        (frozen_target, "changes the variable 'sequential.*' in each batch"),
        (numbers, "cannot be traced on the driver .AttributeError"),
    ],
)
def test_only_steps_that_add_up_allow_several_batches(step: Any, reason: str | None) -> None:
    model = Stepping(step)
    sgd = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model.compile(sgd, jit_compile=False)
    before = [np.array(weight) for weight in model.net.weights]
    found = why_one_batch_per_step(model, (np.ones((8, 4), "f"), np.ones((8, 1), "f")))
    assert re.match(reason or "None", str(found)), found
    for weight, value in zip(model.net.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


class Recurrent(keras.Model):
    """Published step around Keras's own losses and metrics, as in the guide."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, y_pred)


def test_a_published_step_allows_several_batches() -> None:
    inputs = keras.Input((5, 2))
    hidden = keras.layers.GRU(3, recurrent_dropout=0.2)(inputs)
    model = Recurrent(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse", metrics=["mae"])
    batch = (np.ones((4, 5, 2), "f"), np.ones((4, 1), "f"))
    assert why_one_batch_per_step(model, batch) is None
