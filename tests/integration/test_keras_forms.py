"""Losses that layers add, on ranks and in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns

pytestmark = pytest.mark.integration


def write(path: str, rows: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = {
        "wide": rng.normal(size=(rows, 3)).astype(np.float32),
        "narrow": rng.normal(size=rows).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
    }
    write_columns(path, columns, row_group_size=25)
    return columns


class Rebuilds(keras.layers.Layer):
    """Layer that adds its reconstruction loss, in training and inference."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.code = keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.01))
        self.rebuilt = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        code = self.code(x)
        rebuilt = self.rebuilt(code)
        self.add_loss(keras.ops.mean((rebuilt - x) ** 2))
        self.add_loss(0.1 * keras.ops.mean(code**2))
        return code, rebuilt


def make_coder() -> keras.Model:
    keras.utils.set_random_seed(6)
    x = keras.Input((3,))
    model = keras.Model(x, Rebuilds()(x))
    model.compile(keras.optimizers.Adam(0.05))
    return model


def test_losses_added_by_layers_are_weighted_by_rows(store: Any) -> None:
    # 51 rows on one rank and 50 on the other, all in one step.
    columns = write(store.get_train_data_path(), 101)
    alone = make_coder()
    expected = alone.fit(
        columns["wide"], columns["wide"], batch_size=101, epochs=3, shuffle=False, verbose=0
    ).history
    params: dict[str, Any] = {"optimizer": None, "loss": None, "model": make_coder()}
    # The named label is not compared with any output.
    fitted = pooled_estimator(
        store, 2, feature_cols=["wide"], label_cols=["wide"], batch_size=75, epochs=3, **params
    ).fit_on_parquet()
    assert_same_weights(fitted.getModel(), alone)
    np.testing.assert_allclose(fitted.getHistory()["loss"], expected["loss"], rtol=1e-4)
    # All outputs become columns if they have names.
    fitted.setOutputCols(["code", "rebuilt"])
    document, load = fitted._make_predictor()
    found = load(document)([columns["wide"]])
    for ours, theirs in zip(found, alone.predict(columns["wide"], verbose=0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert fitted.getOrDefault("output_shapes") == [[2], [3]]
