"""Half precision for a trained Keras model. Runs where predictions are made."""

from __future__ import annotations

import keras

from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.outputs import symbolic

__all__ = ["reduce_precision"]


def reduce_precision(model: keras.Model, precision: str) -> None:
    """Let a model's layers compute in half precision, as with Keras's mixed policies.

    Variables stay as they are, and so does what layers were told to compute in another type.

    Parameters
    ----------
    model : keras.Model
        Changed in place. Must not have been called yet.
    precision : str
        ``"bfloat16"`` or ``"float16"``; nothing is done for ``"float32"``.
    """
    if precision == "float32":
        return
    policy = keras.DTypePolicy(f"mixed_{precision}")
    for layer in _computing(model):
        own = layer.dtype_policy
        if own.quantization_mode is None and own.compute_dtype == own.variable_dtype == "float32":
            layer.dtype_policy = policy


def _computing(layer: keras.Layer) -> list[keras.Layer]:
    """Return what computes of a layer: not functional models, whose inputs are to stay exact."""
    if isinstance(layer, (keras.layers.InputLayer, keras.layers.Normalization)):
        return []
    if isinstance(layer, keras.Model) and symbolic(layer, "input") is not None:
        return [found for part in layer.layers for found in _computing(part)]
    return all_layers(layer)
