"""What losses of Keras tell about outputs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from wrong_calls import NoRanks

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import KerasEstimator
from hvd_estimators.keras.checks import _check_loss_names
from hvd_estimators.keras.losses import check_loss, kind_of_outputs
from hvd_estimators.keras.outputs import Outputs


def model_with(activation: Any) -> keras.Model:
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(3, name="y")(inputs)
    if isinstance(activation, keras.layers.Layer):
        return keras.Model(inputs, activation(outputs))
    return keras.Model(inputs, keras.layers.Activation(activation)(outputs))


SPARSE = "sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    ("activation", "loss", "shape", "expected"),
    [
        ("softmax", SPARSE, (3,), "probabilities"),
        (keras.layers.Softmax(), keras.losses.CategoricalCrossentropy(), (3,), "probabilities"),
        ("linear", SPARSE, (3,), None),
        ("linear", keras.losses.SparseCategoricalCrossentropy(from_logits=True), (3,), "logits"),
        ("linear", keras.losses.SparseCategoricalCrossentropy(from_logits=True), (3, 3), None),
        ("sigmoid", "binary_crossentropy", (1,), "probabilities"),
        ("sigmoid", keras.losses.binary_crossentropy, (3,), "multilabel_probabilities"),
        ("softmax", keras.losses.binary_crossentropy, (3,), None),
        ("linear", keras.losses.BinaryCrossentropy(from_logits=True), (3,), "multilabel_logits"),
        ("linear", keras.losses.BinaryCrossentropy(from_logits=True), (3, 2), None),
        ("linear", keras.losses.BinaryFocalCrossentropy(from_logits=True), (), "logits"),
        ("linear", keras.losses.BinaryFocalCrossentropy(from_logits=True), None, "logits"),
        ("linear", "mse", (1,), "values"),
        ("linear", keras.losses.Huber(), (), "values"),
        ("linear", "mse", (3,), None),
        ("linear", lambda label, output: output, (1,), None),
    ],
)
def test_kinds(activation: Any, loss: Any, shape: Any, expected: str | None) -> None:
    assert kind_of_outputs(model_with(activation), loss, shape) == expected


def test_the_last_layer_of_a_sequential_model_counts() -> None:
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(3, "softmax")]
    assert kind_of_outputs(keras.Sequential(layers), SPARSE, None) == "probabilities"


def root(label: Any, output: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean((label - output) ** 2))


class OfPairs(keras.losses.Loss):
    """Loss of each row's output and that of its neighbour."""

    def call(self, label: Any, output: Any) -> Any:
        return keras.ops.mean((output - keras.ops.roll(output, 1, axis=0)) ** 2, axis=-1)


@pytest.mark.parametrize("loss", [root, OfPairs()])
@pytest.mark.parametrize("rows", [6, 7])
def test_a_loss_that_is_no_mean_over_rows_is_a_warning(
    loss: Any, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    for weights in (None, np.linspace(1.0, 2.0, rows, dtype=np.float32)):
        caplog.clear()
        compare(loss, rows, weights)
        (warning,) = caplog.messages
        assert warning.startswith("loss: for label 'label' the loss of a few rows is not the mean")


@pytest.mark.parametrize(
    "loss",
    [
        *("mse", "huber", keras.losses.CosineSimilarity(), keras.losses.Dice()),
        lambda label, output: keras.ops.mean(keras.ops.abs(label - output)),
        lambda label, output: keras.ops.max(keras.ops.abs(label - output), axis=-1),
    ],
)
def test_means_over_rows_are_no_warning(loss: Any, caplog: pytest.LogCaptureFixture) -> None:
    compare(loss, 6)
    compare(loss, 1)
    assert not caplog.records


def test_a_sum_over_rows_must_be_declared() -> None:
    def total(label: Any, output: Any) -> Any:
        return keras.ops.sum((label - output) ** 2)

    with pytest.raises(ParamError, match="a mean over rows for label 'label', found a sum"):
        compare(total, 6)
    compare(keras.losses.MeanSquaredError(reduction="sum"), 6)
    compare(Squares(reduction="sum"), 6)


class Squares(keras.losses.Loss):
    """Loss of each row, as a user writes it."""

    def call(self, label: Any, output: Any) -> Any:
        return keras.ops.mean((label - output) ** 2, axis=-1)


def compare(loss: Any, rows: int, weights: Any = None) -> None:
    """Check a loss with rows of random numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 2)).astype(np.float32)
    label, outputs = rng.normal(size=(2, rows, 2)).astype(np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    outputs = keras.ops.convert_to_tensor(outputs)
    check_loss(model, Outputs.of(model, outputs, ["label"], None), x, outputs, label, weights)


@pytest.mark.parametrize("masked", [False, True])
def test_padded_labels_need_a_mask(masked: bool, store: Any, caplog: Any) -> None:
    words = [[1, 2], [1], [3, 1, 2], [2]] * 4
    folder = Path(store.get_train_data_path())
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"words": words, "y": words}), folder / "part-0.parquet")
    inputs = keras.Input((None,), dtype="int32", name="words")
    hidden = keras.layers.Embedding(4, 2, mask_zero=masked)(inputs)
    estimator = KerasEstimator(
        **{"model": keras.Model(inputs, keras.layers.Dense(4)(hidden)), "optimizer": "sgd"},
        **{"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        **{"feature_cols": ["words"], "label_cols": ["y"], "store": store},
        **{"padding": {"words": 0, "y": 0}, "backend": NoRanks(), "batch_size": 4},
    )
    with pytest.raises(AssertionError, match="ranks were to be started"):
        estimator.fit_on_parquet()
    assert ("padding: the label 'y' is padded" in caplog.text) is not masked


def test_names_of_losses_are_checked_by_the_driver() -> None:
    known: Any = SimpleNamespace(loss={"a": "ce", "b": "CrossEntropy", "c": "mse", "d": None})
    _check_loss_names(known)
    unknown: Any = SimpleNamespace(loss=["mse", "mse2"])
    with pytest.raises(ParamError, match=r"^loss: Keras has no loss 'mse2'"):
        _check_loss_names(unknown)
