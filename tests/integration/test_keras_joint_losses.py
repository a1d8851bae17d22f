"""Keras models with one loss of several outputs, and without labels, against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from keras_reference import assert_same_weights, make_estimator
from parquet_files import write_columns
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches

from hvd_estimators import Store
from hvd_estimators.keras import load_predictor

pytestmark = pytest.mark.integration

ROWS, BATCH = 37, 6
"""Of 19 and 18 rows for two ranks: the last batches are of different sizes."""


@pytest.fixture
def ranks() -> StandingBackend:
    return shared_ranks(2, "tensorflow")


def write(store: Store) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(ROWS, 4)).astype(np.float32),
        "noise": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "y": rng.normal(size=ROWS).astype(np.float32),
    }
    for path in (store.get_train_data_path(), store.get_val_data_path()):
        write_columns(path, columns, row_group_size=17)
    return columns


def elbo(outputs: Any, x: Any) -> Any:
    reconstruction, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
    error = keras.ops.sum((reconstruction - x) ** 2, axis=1)
    return keras.ops.mean(error) + keras.ops.mean(keras.ops.sum(divergence, axis=1))


class Variational(keras.Model):
    """Three outputs, one loss, no labels; the noise is an input, which makes it reproducible."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = keras.layers.Dense(4)
        self.decoder = keras.layers.Dense(4)

    def call(self, inputs: Any) -> Any:
        x, noise = inputs
        mean, log_variance = keras.ops.split(self.encoder(x), 2, axis=1)
        return self.decoder(mean + noise * keras.ops.exp(0.5 * log_variance)), mean, log_variance


class WithLoss(Variational):
    """Model with a loss that Keras's own step computes."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> Any:
        assert y is None
        return elbo(y_pred, x[0])


class WithStep(Variational):
    """Model with the train step of keras.io's autoencoders: data are the inputs alone."""

    def train_step(self, data: Any) -> dict[str, Any]:
        (inputs,) = data
        with tf.GradientTape() as tape:
            loss = elbo(self(inputs, training=True), inputs[0])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def with_features() -> keras.Model:
    """Return a model that outputs features in addition to the labelled output."""
    x = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(3, activation="tanh")(x)
    return keras.Model(x, [hidden, keras.layers.Dense(1)(hidden)])


def of_vae(model: keras.Model, batch: dict[str, np.ndarray]) -> Any:
    return elbo(model((batch["x"], batch["noise"]), training=True), batch["x"])


def of_label(model: keras.Model, batch: dict[str, np.ndarray]) -> Any:
    return keras.ops.mean((model(batch["x"], training=True)[1][:, 0] - batch["y"]) ** 2)


NO_LABELS: dict[str, Any] = {
    "loss": None,
    "feature_cols": ["x", "noise"],
    "label_cols": [],
    "outputs": 0,
}
CASES: dict[str, tuple[Callable[[], keras.Model], Any, dict[str, Any]]] = {
    "compute_loss": (WithLoss, of_vae, {**NO_LABELS, "validation": True}),
    "train_step": (WithStep, of_vae, NO_LABELS),
    "an output without a label": (
        with_features,
        of_label,
        {"feature_cols": ["x"], "label_cols": ["y"], "outputs": [1], "validation": True},
    ),
}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_labels_need_not_match(ranks: Any, tmp_path: Path, case: str) -> None:
    make, loss, params = CASES[case]
    store = Store.create(str(tmp_path / "store"))
    columns = write(store)
    keras.utils.set_random_seed(7)
    model = make()
    loss(model, columns)
    weights = model.get_weights()
    fitted = make_estimator(
        store, 2, backend=ranks, model=model, batch_size=BATCH, epochs=2, **params
    ).fit_on_parquet()

    expected = make()
    loss(expected, columns)
    expected.set_weights(weights)
    optimizer = keras_reference.OPTIMIZERS["sgd"]()
    for rows in global_batches(ROWS, 2, BATCH) * 2:
        with tf.GradientTape() as tape:
            value = loss(expected, {name: column[rows] for name, column in columns.items()})
        variables = expected.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)
    assert_same_weights(fitted.getModel(), expected)
    if "validation" in params:
        found = fitted.getHistory()["val_loss"][-1]
        assert found == pytest.approx(float(loss(expected, columns)), rel=1e-4)

    names = params["feature_cols"]
    inputs = [columns[name] for name in names]
    prediction = expected(inputs[0] if len(inputs) == 1 else tuple(inputs))
    path = str(tmp_path / "saved")
    fitted.save(path)
    loaded = load_predictor(path)
    column, *classes = loaded.output_columns
    assert classes == (["prediction"] if params["label_cols"] else [])
    assert column == ("y__output" if params["label_cols"] else "output")
    place = 1 if params["label_cols"] else 0
    np.testing.assert_allclose(
        np.asarray(loaded.predict({name: columns[name] for name in names})[column]).reshape(
            ROWS, -1
        ),
        prediction[place],
        rtol=1e-4,
        atol=1e-5,
    )
