"""What losses of Keras tell about outputs."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from hvd_estimators.keras.losses import kind_of_outputs


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
        ("sigmoid", keras.losses.binary_crossentropy, (3,), None),
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
