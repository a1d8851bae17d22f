"""Fingerprint of a Keras model without its weights' values. Runs on the driver."""

from __future__ import annotations

from typing import Any

import keras

from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.keras.backend import all_layers, model_optimizers

__all__ = ["model_fingerprint"]


def model_fingerprint(model: keras.Model, other_rate: bool) -> dict[str, Any]:
    """Return a model's layers, weight shapes and optimizers, without names that Keras numbers.

    Parameters
    ----------
    model : keras.Model
        The model, built and compiled.
    other_rate : bool
        Whether a param replaces the optimizer's learning rate.
    """
    left_out = ("name", "learning_rate") if other_rate else ("name",)
    return {
        "class": named(type(model)),
        "layers": {
            f"{number} ({named(type(layer))})": _config(layer)
            for number, layer in enumerate(all_layers(model, include_self=False))
        },
        "weights": [[list(weight.shape), str(weight.dtype)] for weight in model.weights],
        "optimizers": {
            f"{number} ({named(type(optimizer))})": _config(optimizer, left_out)
            for number, optimizer in enumerate(model_optimizers(model))
        },
    }


def _config(given: Any, left_out: tuple[str, ...] = ("name",)) -> dict[str, Any]:
    """Return a config's plain values; an empty dict if there is no config."""
    try:
        config = given.get_config()
    except Exception:
        return {}
    kept = {}
    for key, value in config.items():
        if key == "learning_rate" and isinstance(value, dict) and key not in left_out:
            kept[key] = named(value.get("config"))
        elif key not in left_out and isinstance(value, (bool, int, float, str)):
            kept[key] = value
    return kept
