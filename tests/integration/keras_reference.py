"""Reference training in one process, with plain Keras."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from estimators import exact_params
from rank_pool import shared_ranks
from reference import WIDTH, RecordingBackend

from hvd_estimators.keras import KerasEstimator

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def make_net() -> keras.Model:
    # Keras's function would import TensorFlow on torch, too.
    random.seed(7)
    return keras.Sequential(
        [keras.Input((WIDTH,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def train_alone(
    columns: dict[str, np.ndarray],
    batches: Sequence[np.ndarray],
    optimizer: keras.optimizers.Optimizer,
    epochs: int,
    net: keras.Model | None = None,
    loss: str = "mse",
) -> keras.Model:
    """Train in one process, with plain Keras."""
    net = net or make_net()
    net.compile(optimizer, loss)
    for _ in range(epochs):
        for rows in batches:
            net.train_on_batch(columns["features"][rows], columns["label"][rows, None])
    return net


def pooled_estimator(store: Any, ranks: int, **params: Any) -> KerasEstimator:
    """Return an estimator whose ranks are shared by all fits of a test module."""
    return make_estimator(
        store, ranks, **{"backend": shared_ranks(ranks, keras.backend.backend()), **params}
    )


def make_estimator(store: Any, ranks: int, **params: Any) -> KerasEstimator:
    """Return an estimator, of a class other than KerasEstimator if ``kind`` is one."""
    kind: type[KerasEstimator] = params.pop("kind", KerasEstimator)
    return kind(
        **exact_params(
            params.pop("backend", None) or RecordingBackend(ranks, env=QUIET),
            store,
            **{"model": make_net(), "optimizer": OPTIMIZERS["sgd"](), "loss": "mse", **params},
        )
    )


def assert_same_weights(found: keras.Model, expected: keras.Model) -> None:
    for a, b in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=a.path)
