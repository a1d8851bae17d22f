"""Keras models that squeeze the dimension of rows from a batch of one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import pooled_estimator
from reference import WIDTH, global_batches, write_rows

from hvd_estimators.keras import load_predictor

pytestmark = pytest.mark.integration


@keras.saving.register_keras_serializable("tests")
class Squeezed(keras.Model):
    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units, kernel_initializer=keras.initializers.Constant(0.1))

    def call(self, x: Any) -> Any:
        return keras.ops.squeeze(self.dense(x))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def functional(units: int) -> keras.Model:
    inputs = keras.Input((WIDTH,))
    dense = keras.layers.Dense(units, kernel_initializer=keras.initializers.Constant(0.1))
    return keras.Model(inputs, keras.ops.squeeze(dense(inputs)))


@pytest.mark.parametrize(("label", "units"), [("label", 1), ("features", WIDTH)])
@pytest.mark.parametrize("make", [Squeezed, functional])
def test_models_that_squeeze_train_and_predict_one_row(
    store: Any, tmp_path: Path, make: Any, label: str, units: int
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), 33)
    write_rows(Path(store.get_val_data_path()), 3, seed=1)
    model = pooled_estimator(
        store,
        2,
        model=make(units),
        label_cols=[label],
        metrics=["mae"],
        validation=True,
        batch_size=16,
        val_batch_size=1,
        epochs=2,
    ).fit_on_parquet()
    kernel, bias = np.full((WIDTH, units), 0.1, np.float32), np.zeros(units, np.float32)
    x, y = columns["features"], columns[label].reshape(33, -1)
    batches = global_batches(33, 2, 16)
    assert len(batches[-1]) == 2  # one row on each rank
    for rows in batches * 2:
        slope = 2 * (x[rows] @ kernel + bias - y[rows]) / (len(rows) * units)
        kernel, bias = kernel - 0.05 * x[rows].T @ slope, bias - 0.05 * slope.sum(axis=0)
    for found, expected in zip(model.getModel().get_weights(), (kernel, bias), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    outputs = (x @ kernel + bias)[:3].reshape(columns[label][:3].shape)
    model.save(str(tmp_path / "model"))
    for rows in (1, 3):
        # The last of three rows is a batch of its own.
        predictor = load_predictor(str(tmp_path / "model"), batch_size=2)
        found = predictor.predict({"features": x[:rows]})[f"{label}__output"]
        np.testing.assert_allclose(found, outputs[:rows], rtol=1e-4, atol=1e-5)
    document, load, combine = model._make_evaluator()
    sums = load(document).start()
    for row in range(3):
        sums.add({name: array[row : row + 1] for name, array in columns.items()})
    (count, values), error = combine([sums.state()]), outputs - columns[label][:3]
    assert count == 3
    assert values["loss"] == pytest.approx(float((error**2).mean()), rel=1e-4)
    assert values["mae"] == pytest.approx(float(np.abs(error).mean()), rel=1e-4)
