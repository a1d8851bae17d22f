"""Calls of a model on the driver that leave it, and Python's random numbers, as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.keras.tensors import alike

__all__ = ["SHAPE_KINDS", "call_on_zeros", "kept_random_state", "kept_variables"]

SHAPE_KINDS = (tf.errors.InvalidArgumentError,)
"""What TensorFlow raises for shapes, beside Python's own exceptions."""


def call_on_zeros(model: keras.Model, inputs: Any) -> Any:
    """Return the outputs of a model for two rows of zeros; the inputs have to tell their shapes."""
    x = alike(keras.tree.map_structure(lambda field: field.zeros(2), inputs))
    with kept_random_state(), tf.device("CPU:0"):
        return model(x, training=False)


@contextlib.contextmanager
def kept_variables(model: keras.Model) -> Iterator[None]:
    """Leave what a built model keeps as it is: layers may count calls, or draw random numbers."""
    kept = [(v, v.numpy()) for v in model.variables] if model.built else []
    try:
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave Python's and NumPy's random numbers as they are: Keras draws seeds from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
