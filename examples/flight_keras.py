"""The network of ``flight_networks.py`` in Keras."""

from __future__ import annotations

from typing import Any

import keras
from flight_data import INDEXED
from flight_networks import Sizes

from hvd_estimators.keras import KerasEstimator


def keras_network(sizes: Sizes) -> keras.Model:
    """Return the network in Keras."""
    categories = [keras.Input((1,), name=name) for name in INDEXED]
    continuous = keras.Input((sizes.continuous,), name="continuous")
    near_zero = keras.initializers.RandomNormal(stddev=0.1)
    embedded = [
        keras.layers.Flatten()(
            keras.layers.Embedding(size, dim, embeddings_initializer=near_zero.clone())(category)
        )
        for category, size, dim in zip(
            categories, sizes.categories, sizes.embedding_dims(), strict=True
        )
    ]
    x = keras.layers.Concatenate()([*embedded, continuous])
    for width in (128, 64):
        x = keras.layers.Dense(width, activation="relu")(x)
        x = keras.layers.Dropout(0.2)(x)
    x = keras.layers.Dense(1)(x)
    output = keras.layers.Rescaling(sizes.label_std, offset=sizes.label_mean)(x)
    return keras.Model([*categories, continuous], output)


def estimator(sizes: Sizes, learning_rate: float, **params: Any) -> KerasEstimator:
    """Return an estimator of the network in Keras."""
    return KerasEstimator(
        model=keras_network(sizes),
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="mse",
        **params,
    )
