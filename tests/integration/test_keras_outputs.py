"""Outputs, losses, weights, metrics and columns are matched by name, as in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras_reference import assert_same_weights, pooled_estimator
from parquet_files import write_columns
from variants import others_in_soak

pytestmark = pytest.mark.integration

LABELS = ["zeta", "alpha", "Mid"]
"""Neither in the order of sorted keys nor in that of the model's layers."""


def write(path: str, rows: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "zeta": rng.normal(size=rows).astype(np.float32),
        "alpha": (rng.normal(size=rows) > 0).astype(np.float32),
        "Mid": rng.normal(10.0, size=(rows, 2)).astype(np.float32),
        "weight": rng.uniform(0.5, 2.0, size=rows),
    }
    write_columns(path, columns, row_group_size=25)
    return columns


class Heads(keras.Model):
    """Model that returns a dict with one unlabelled output."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.mid = keras.layers.Dense(2)
        self.alpha = keras.layers.Dense(1, activation="sigmoid")
        self.zeta = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        return {
            "alpha": self.alpha(hidden),
            "zeta": self.zeta(hidden),
            "embedding": hidden,
            "Mid": self.mid(hidden),
        }


def functional(as_dict: bool) -> keras.Model:
    keras.utils.set_random_seed(5)
    x = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh")(x)
    outputs = {
        # A dict is matched by its keys, a list by the names of the layers.
        "alpha": keras.layers.Dense(1, "sigmoid", name="zeta" if as_dict else "alpha")(hidden),
        "Mid": keras.layers.Dense(2, name="Mid")(hidden),
        "zeta": keras.layers.Dense(1, name="alpha" if as_dict else "zeta")(hidden),
    }
    return keras.Model(x, outputs if as_dict else list(outputs.values()))


def built_heads() -> keras.Model:
    keras.utils.set_random_seed(5)
    model = Heads()
    model(np.zeros((1, 3)))
    return model


def fit_alone(model: keras.Model, columns: dict[str, np.ndarray], aux: bool) -> Any:
    """Fit by names, as in Keras's documentation."""
    order = ["alpha", "Mid", "zeta"]
    losses = {"zeta": "mse", "alpha": "binary_crossentropy", "Mid": "mae"}
    weights = {"zeta": 1.0, "alpha": 10.0, "Mid": 0.1}
    metrics = {"zeta": ["mae"], "Mid": ["mse"]}
    labels = {name: columns[name].reshape(len(columns["x"]), -1) for name in LABELS}
    y: Any = labels
    given: Any = (losses, weights, metrics)
    if aux:
        y = {**labels, "embedding": np.zeros((len(columns["x"]), 1))}
        given = ({**losses, "embedding": None}, {**weights, "embedding": 1.0}, metrics)
    elif not isinstance(model.output, dict):
        y = [labels[name] for name in order]
        given = (
            [losses[name] for name in order],
            [weights[name] for name in order],
            [metrics.get(name) for name in order],
        )
    loss, loss_weights, metrics = given
    model.compile(keras.optimizers.SGD(0.05), loss=loss, loss_weights=loss_weights, metrics=metrics)
    done = model.fit(
        columns["x"], y, sample_weight=columns["weight"], batch_size=60, epochs=2, verbose=0
    )
    return done.history


@pytest.mark.parametrize("kind", others_in_soak("dict", "subclassed", "list"))
def test_labels_are_matched_with_outputs_by_name(store: Any, kind: str) -> None:
    columns = write(store.get_train_data_path())
    alone = built_heads() if kind == "subclassed" else functional(kind == "dict")
    model = built_heads() if kind == "subclassed" else functional(kind == "dict")
    expected = fit_alone(alone, columns, aux=kind == "subclassed")
    params: dict[str, Any] = {
        "loss": {"Mid": "mae", "zeta": "mse", "alpha": "binary_crossentropy"},
        "loss_weights": [1.0, 10.0, 0.1],
        "metrics": {"Mid": ["mse"], "zeta": ["mae"]},
    }
    if kind == "list":
        params = {
            "loss": ["mse", "binary_crossentropy", "mae"],
            "loss_weights": {"alpha": 10.0, "Mid": 0.1},
            "metrics": [["mae"], None, ["mse"]],
        }
    fitted = pooled_estimator(
        store,
        2,
        model=model,
        optimizer=keras.optimizers.SGD(0.05),
        feature_cols=["x"],
        label_cols=LABELS,
        sample_weight_col="weight",
        batch_size=30,
        epochs=2,
        **params,
    ).fit_on_parquet()
    trained = fitted.getModel()
    assert_same_weights(trained, alone)
    history = fitted.getHistory()
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)
    # Each column holds the output of its name.
    assert fitted.getOrDefault("output_shapes") == [[1], [1], [2]]
    _, load = fitted._make_predictor()
    document, _ = fitted._make_predictor()
    zeta, alpha, mid = load(document)([columns["x"]])
    outputs = trained.predict(columns["x"], verbose=0)
    if kind == "list":
        outputs = dict(zip(["alpha", "Mid", "zeta"], outputs, strict=True))
    for found, name in [(zeta, "zeta"), (alpha, "alpha"), (mid, "Mid")]:
        np.testing.assert_allclose(found, outputs[name], rtol=1e-5, err_msg=name)
