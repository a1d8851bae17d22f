"""Inputs and labels of a model: pairing with columns, and conversion to tensors.

Used on the driver and on workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.inputs import matrix_hint
from hvd_estimators.exceptions import DataError, ShapeError
from hvd_estimators.keras.backend import on_tensorflow, snapshot
from hvd_estimators.keras.outputs import symbolic
from hvd_estimators.keras.shard_state import torch_buffers
from hvd_estimators.training.row_weights import check_rank

ops: Any = keras.ops


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
            return ops.convert_to_tensor(array.reshape(len(array), *shape), "string")
        return array.astype(dtype, copy=False).reshape(len(array), *shape)

    def check_whole(self, array: Array) -> None:
        """Reject fractions and NaN in a column that the model takes as integers."""
        if array.dtype.kind != "f" or "int" not in self.dtype_of(array.dtype):
            return
        wrong = array != np.floor(array)
        if wrong.any():
            raise DataError(
                f"expected whole numbers in the column {self.column!r}, which the model takes as "
                f"{self.dtype}, found {array[wrong][0]:g}. Round the column, or give the model an "
                "input of floats.",
                param="feature_cols",
                column=self.column,
            )

    def tensor(self, tensor: Any) -> Any:
        """Convert a column's tensor, rows first, to the model's input."""
        given, name = tuple(tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
        shape, dtype = self._form(given, np.dtype(object if name == "string" else name))
        if shape != given:
            tensor = ops.reshape(tensor, (ops.shape(tensor)[0], *shape))
        return tensor if dtype == name else ops.cast(tensor, dtype)

    @property
    def takes_text(self) -> bool:
        """Return whether an input may be text: its type is text, or is unknown."""
        return self.dtype in (None, "string")

    def _form(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[tuple[int, ...], str]:
        return (shape or (1,)) if self.shape is None else self.shape, self.dtype_of(dtype)

    def dtype_of(self, dtype: np.dtype[Any]) -> str:
        """Return the type of the tensor for a column of a type."""
        if dtype.kind in "OSU":
            if not on_tensorflow():
                raise ShapeError(
                    f"column {self.column!r} holds text, which Keras has on "
                    "TensorFlow only. Make numbers of it before, with "
                    "pyspark.ml.feature.StringIndexer or a transformation_fn, or set "
                    "KERAS_BACKEND=tensorflow.",
                    param="feature_cols",
                )
            return "string"
        return self.dtype or (keras.config.floatx() if dtype.kind in "fb" else dtype.name)


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
        return self.tensors(to_tensors(columns))

    def tensors(self, columns: Mapping[str, Any]) -> Any:
        """Return inputs, labels and weights of a batch; only the inputs without labels.

        Lists become tuples, as in `Model.fit`, since ``tf.data`` treats a list as one tensor.
        """
        x = _without_lists(self.inputs, lambda f: f.tensor(columns[f.column]))
        if self.labels == ():
            return _alone(x)
        rows = ops.shape(next(iter(columns.values())))[0]

        def label(field: Field) -> Any:
            if field == ZEROS:
                return ops.zeros((rows, 1), keras.config.floatx())
            return field.tensor(columns[field.column])

        y = _without_lists(self.labels, label)
        weight = None
        if self.sample_weight_col is not None:
            weight = ops.cast(columns[self.sample_weight_col], keras.config.floatx())
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


def to_tensors(columns: Columns) -> dict[str, Any]:
    """Convert the arrays of some rows to tensors, which may share their memory."""
    return {
        # Torch warns about arrays that it may not write to.
        name: ops.convert_to_tensor(a if a.flags.writeable or on_tensorflow() else a.copy())
        for name, a in columns.items()
    }


def alike(structure: Any) -> Any:
    """Convert arrays to tensors if some are tensors (text), since Keras does not accept both."""
    if not any(ops.is_tensor(part) for part in keras.tree.flatten(structure)):
        return structure
    return keras.tree.map_structure(ops.convert_to_tensor, structure)


def _without_lists(structure: Any, function: Callable[[Field], Any]) -> Any:
    if isinstance(structure, dict):
        return {name: _without_lists(part, function) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        return tuple(_without_lists(part, function) for part in structure)
    return function(structure)


def class_weights(labels: Any, weights: Mapping[int, float]) -> Any:
    """Return the class weight of each row; 1 for classes without a weight.

    Parameters
    ----------
    labels : tensor
        Class numbers, of shape ``(rows,)`` or ``(rows, 1)``, or one-hot rows.
    weights : mapping
        Class to weight.
    """
    check_rank(labels)
    if len(labels.shape) > 1 and labels.shape[-1] > 1:
        classes = ops.argmax(labels, axis=-1)
    else:
        flat = ops.reshape(labels, (-1,))
        classes = ops.round(flat) if keras.backend.is_float_dtype(flat.dtype) else flat
    weighted_classes = sorted(weights)
    numbers = ops.convert_to_tensor(weighted_classes, "int64")
    classes = ops.cast(classes, "int64")
    indices = ops.minimum(ops.searchsorted(numbers, classes), len(weighted_classes) - 1)
    values = ops.take(
        ops.convert_to_tensor([weights[n] for n in weighted_classes], keras.config.floatx()),
        indices,
    )
    has_weight = ops.equal(ops.take(numbers, indices), classes)
    return ops.where(has_weight, values, ops.ones_like(values))


@contextlib.contextmanager
def kept_variables(model: keras.Model) -> Iterator[None]:
    """Restore a built model's variables after the block: layers may count calls or draw numbers."""
    values: list[Any] = [(v, snapshot(v.value)) for v in model.variables] if model.built else []
    values += [(buffer, buffer.numpy()) for buffer in torch_buffers(model)]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)


def input_structure(
    model: keras.Model, feature_cols: Sequence[str], keys: Sequence[str] | None = None
) -> Any:
    """Return a model's inputs as fields in the model's structure.

    Inputs in a dict pair with the columns that have the names of its keys. Other inputs of a
    functional model pair by name if each input has the name of a column, and by position otherwise.

    Parameters
    ----------
    model : keras.Model
        The model. Functional and sequential models define their inputs; other models define them
        when they are built. An unbuilt model of another kind gets one tensor or a tuple of several,
        or a dict if a functional model in it takes one.
    feature_cols : sequence of str
        One column per input.
    keys : sequence of str, optional
        Keys of the columns in the dict that a subclassed model takes, if known.

    Raises
    ------
    ShapeError
        If the columns do not match the model's inputs.
    """
    structure = symbolic(model, "input")
    if structure is None:
        return _of_subclassed(model, feature_cols, keys)
    inputs = keras.tree.flatten(structure)
    if len(inputs) != len(feature_cols):
        hint = ""
        if len(inputs) == 1:
            hint = matrix_hint(dict.fromkeys(feature_cols, ()))
            hint += " pyspark.ml.feature.VectorAssembler also joins vectors."
        elif len(inputs) < len(feature_cols):
            hint = ' [["a", "b"], "c"] makes one input of the columns a and b, and another of c.'
        raise ShapeError(
            f"the model has {len(inputs)} inputs "
            f"({', '.join(tensor.name for tensor in inputs)}), and there are {len(feature_cols)} "
            f"feature columns: {', '.join(feature_cols)}. Set one column per input.{hint}",
            param="feature_cols",
        )
    if isinstance(structure, Mapping) and len(structure) == len(inputs) > 1:
        _check_names(structure, feature_cols)
        return {name: _input_field(name, structure[name]) for name in structure}
    names = [tensor.name for tensor in inputs]
    columns = names if set(names) == set(feature_cols) else feature_cols
    flat = [_input_field(n, t) for n, t in zip(columns, inputs, strict=True)]
    return keras.tree.pack_sequence_as(structure, flat)


def input_keys(model: keras.Model, inputs: Any) -> list[str] | None:
    """Return the keys of a subclassed model's inputs, in order; None if it takes no dict."""
    if symbolic(model, "input") is None and isinstance(inputs, dict):
        return list(inputs)
    return None


def called_with(model: keras.Model) -> Any:
    """Return the shapes that a model was built with, in its inputs' structure, or None."""
    try:
        config = model.get_build_config()
    except (NotImplementedError, TypeError, ValueError):
        return None
    return config.get("input_shape") if isinstance(config, Mapping) else None


def text_columns(inputs: Any) -> dict[str, bool]:
    """Return the columns that may be text for a model, each with whether text is required.

    Parameters
    ----------
    inputs : Field, or nested structure of Field
        See `input_structure`.
    """
    fields = keras.tree.flatten(inputs)
    return {field.column: field.dtype == "string" for field in fields if field.takes_text}


def _of_subclassed(
    model: keras.Model, feature_cols: Sequence[str], keys: Sequence[str] | None
) -> Any:
    shapes = called_with(model)
    if keys is None and isinstance(shapes, Mapping):
        keys = list(shapes)
        if len(keys) > 1:
            _check_names(keys, feature_cols)
            keys = list(feature_cols)
    if keys is not None:
        if len(keys) != len(feature_cols):
            raise ShapeError(
                f"the model takes a dict with the keys {', '.join(keys)}, and the "
                f"feature columns are {', '.join(feature_cols)}. Set one column per key.",
                param="feature_cols",
            )
        return {key: Field(name) for key, name in zip(keys, feature_cols, strict=True)}
    if shapes is None and len(feature_cols) > 1:
        # A functional model inside would assign the values of a tuple in the order of sorted keys.
        within = (symbolic(layer, "input") for layer in model.layers)
        if any(isinstance(part, dict) and set(part) == set(feature_cols) for part in within):
            return _named(feature_cols)
    return _positional(feature_cols)


def _check_names(keys: Any, feature_cols: Sequence[str]) -> None:
    if set(keys) != set(feature_cols):
        raise ShapeError(
            f"the model takes a dict with the keys {', '.join(map(str, keys))}, and "
            f"the feature columns are {', '.join(feature_cols)}. Inputs in a dict pair with "
            "columns by name: set feature_cols to the keys, and rename columns to them.",
            param="feature_cols",
        )


def _named(feature_cols: Sequence[str]) -> dict[str, Field]:
    return {name: Field(name) for name in feature_cols}


def _positional(feature_cols: Sequence[str]) -> Any:
    fields = [Field(name) for name in feature_cols]
    return fields[0] if len(fields) == 1 else tuple(fields)


def _input_field(column: str, tensor: Any) -> Field:
    shape = tuple(tensor.shape[1:])
    is_known = all(size is not None for size in shape)
    return Field(column, shape if is_known else None, keras.backend.standardize_dtype(tensor.dtype))
