"""Weights of classes as weights of rows, as Keras reads ``class_weight``. Used on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.parquet.columns import Array

__all__ = ["check_classes", "class_weights", "class_weights_of_tensor"]


def class_weights(labels: Array, weights: Mapping[int, float]) -> Array:
    """Return the weight of the class of each row; 1 for classes that are not named.

    Parameters
    ----------
    labels : ndarray
        Class numbers, of shape ``(rows,)`` or ``(rows, 1)``, or one-hot rows.
    weights : mapping
        Class to weight.
    """
    classes, known = _classes(labels), sorted(weights)
    floatx = keras.config.floatx()
    found = np.ones(len(labels), floatx)
    for index in known:
        found[classes == index] = weights[index]
    return found


def class_weights_of_tensor(labels: tf.Tensor, weights: Mapping[int, float]) -> tf.Tensor:
    """Do what `class_weights` does, in a traced function."""
    if labels.shape.rank > 1 and labels.shape[-1] > 1:
        classes = tf.argmax(labels, axis=-1)
    else:
        given = tf.reshape(labels, (-1,))
        classes = tf.cast(tf.round(given) if given.dtype.is_floating else given, tf.int64)
    known = sorted(weights)
    numbers = tf.constant(known, tf.int64)
    places = tf.minimum(tf.searchsorted(numbers, classes), len(known) - 1)
    found = tf.gather(tf.constant([weights[k] for k in known], keras.config.floatx()), places)
    return tf.where(tf.equal(tf.gather(numbers, places), classes), found, tf.ones_like(found))


def check_classes(name: str, labels: Array) -> None:
    """Make sure that labels are class numbers or one-hot rows. Runs on the driver.

    Raises
    ------
    ShapeError
        If a row has more than one dimension.
    DataError
        If there are other numbers in them.
    """
    _check_rank(labels)
    if labels.ndim == 2 and labels.shape[1] > 1:
        # The largest value of a row, since labels may be smoothed.
        odd = (labels == labels.max(axis=1, keepdims=True)).sum(axis=1) > 1
    else:
        labels = labels.reshape(-1)
        odd = labels != np.round(labels)
    if odd.any():
        raise DataError(
            f"class_weight: expected class numbers or one-hot rows in column {name!r}, found "
            f"{labels[odd][0].tolist()}. Leave class_weight out, and set sample_weight_col "
            "to a column with the weight of each row."
        )


def _check_rank(labels: Any) -> None:
    if len(labels.shape) > 2:
        raise ShapeError(
            "class_weight: expected class numbers or one-hot rows as labels, found rows of shape "
            f"{tuple(labels.shape[1:])}. Leave class_weight out, and weigh elements in the loss."
        )


def _classes(labels: Array) -> Array:
    _check_rank(labels)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        return labels.argmax(axis=-1)
    return np.round(labels.reshape(-1)).astype(np.int64)
