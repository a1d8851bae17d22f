"""Convert columns to a model's inputs and labels. Used on the driver and on workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.keras.compile_args import class_weights


@dataclass(frozen=True)
class Field:
    """One column as one tensor.

    Attributes
    ----------
    column : str
        The column.
    shape : tuple of int, or None
        Shape of a row; None for the column's own shape, with ``(1,)`` for a number.
    dtype : str or None
        Type of the elements, "string" for text. None selects Keras's float type if the column holds
        floats or booleans, and the column's own type otherwise.
    """

    column: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None

    def array(self, array: Array) -> Any:
        """Convert a column's array, rows first, to the model's input; text becomes a tensor."""
        shape, dtype = self._form(array.shape[1:], array.dtype)
        if dtype == "string":
            # NumPy's text arrays hold objects, which Keras does not always accept.
            return tf.constant(array.reshape(len(array), *shape), tf.string)
        return array.astype(dtype, copy=False).reshape(len(array), *shape)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Convert a column's tensor, rows first, to the model's input."""
        given = tuple(tensor.shape[1:])
        shape, dtype = self._form(given, np.dtype(tensor.dtype.as_numpy_dtype))
        if shape != given:
            rows = tensor.shape[0]
            tensor = tf.reshape(tensor, (tf.shape(tensor)[0] if rows is None else rows, *shape))
            tensor = tf.ensure_shape(tensor, (rows, *shape))
        return tf.cast(tensor, dtype)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a column's rows have as many elements as the tensor's rows."""
        return self.shape is None or math.prod(self.shape) == math.prod(shape)

    @property
    def takes_text(self) -> bool:
        """Return whether an input may be text: its type is text, or is unknown."""
        return self.dtype in (None, "string")

    def zeros(self, rows: int) -> Any:
        """Return rows of zeros, or of empty strings; the shape must be known."""
        shape = (rows, *(self.shape or ()))
        return self.array(np.full(shape, "", object) if self.dtype == "string" else np.zeros(shape))

    def _form(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], str]:
        own = (shape or (1,)) if self.shape is None else self.shape
        if dtype.kind in "OSU":
            return own, "string"
        return own, self.dtype or (keras.config.floatx() if dtype.kind in "fb" else dtype.name)


ZEROS = Field("")
"""A zero for every row, for tensors that Keras requires but does not read."""


@dataclass(frozen=True)
class TensorSpec:
    """All of a model's tensors.

    Attributes
    ----------
    inputs, labels : Field, or nested structure of Field
        The model's inputs and labels, in the structures of its inputs and outputs. `ZEROS` stands
        for outputs without a label. Labels are () if there are none.
    sample_weight_col : str or None
        Column with the weight of each row.
    class_weight : mapping or None
        Weight of each class of the only label, which multiplies the row's weight.
    """

    inputs: Any
    labels: Any
    sample_weight_col: str | None = None
    class_weight: Mapping[int, float] | None = None

    def for_validation(self) -> TensorSpec:
        """Return the tensors for validation, which has no class weights."""
        return replace(self, class_weight=None)

    def arrays(self, columns: Columns) -> Any:
        """Return the `tensors` of some rows that are given as arrays."""
        return self.tensors({name: tf.convert_to_tensor(a) for name, a in columns.items()})

    def tensors(self, columns: dict[str, tf.Tensor]) -> Any:
        """Return inputs, labels and weights of a batch; only the inputs without labels.

        Lists become tuples, as in `Model.fit`, since ``tf.data`` treats a list as one tensor.
        """
        x = _without_lists(self.inputs, lambda f: f.tensor(columns[f.column]))
        if self.labels == ():
            return _alone(x)
        rows = tf.shape(next(iter(columns.values())))[0]

        def label(field: Field) -> tf.Tensor:
            if field == ZEROS:
                return tf.zeros((rows, 1), keras.config.floatx())
            return field.tensor(columns[field.column])

        y = _without_lists(self.labels, label)
        weight = None
        if self.sample_weight_col is not None:
            weight = tf.cast(columns[self.sample_weight_col], keras.config.floatx())
        if self.class_weight:
            (label_field,) = self.label_fields()
            labels = label_field.tensor(columns[label_field.column])
            by_class = class_weights(labels, self.class_weight)
            weight = by_class if weight is None else weight * by_class
        return (x, y) if weight is None else (x, y, weight)

    def label_fields(self) -> Iterator[Field]:
        """Yield the fields of the labels, in the order of the structure."""
        yield from (field for field in keras.tree.flatten(self.labels) if field != ZEROS)


def _alone(x: Any) -> Any:
    """Return inputs without labels as ``Model.fit(x)`` passes them to ``train_step``."""
    return (x,) if keras.tree.is_nested(x) else x


def alike(structure: Any) -> Any:
    """Convert arrays to tensors if some are tensors (text), since Keras does not accept both."""
    if not any(tf.is_tensor(part) for part in keras.tree.flatten(structure)):
        return structure
    return keras.tree.map_structure(tf.convert_to_tensor, structure)


def _without_lists(structure: Any, function: Callable[[Field], tf.Tensor]) -> Any:
    if isinstance(structure, dict):
        return {name: _without_lists(part, function) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_without_lists(part, function) for part in structure)
    return function(structure)
