"""Inputs of a model: pairing with feature columns by name, and trial calls on the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvd_estimators.data.inputs import matrix_hint
from hvd_estimators.exceptions import ShapeError
from hvd_estimators.keras.backend import kept_random_state
from hvd_estimators.keras.outputs import symbolic
from hvd_estimators.keras.tensors import Field, alike

SHAPE_KINDS = (tf.errors.InvalidArgumentError,)
"""TensorFlow's exceptions for wrong shapes, in addition to Python's own."""


def call_on_zeros(model: keras.Model, inputs: Any) -> Any:
    """Return the outputs of a model for two rows of zeros; the input shapes must be known."""
    x = alike(keras.tree.map_structure(lambda field: field.zeros(2), inputs))
    with kept_random_state(), tf.device("CPU:0"):
        return model(x, training=False)


@contextlib.contextmanager
def kept_variables(model: keras.Model) -> Iterator[None]:
    """Restore a built model's variables after the block: layers may count calls or draw numbers."""
    # Tensors share the memory of their variables until these change.
    values = [(v, tf.convert_to_tensor(v.value)) for v in model.variables] if model.built else []
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)


def input_structure(
    model: keras.Model,
    feature_cols: Sequence[str],
    keys: Sequence[str] | None = None,
    by_name: bool = True,
) -> Any:
    """Return a model's inputs as fields in the model's structure.

    Inputs in a dict pair with the columns that have the names of its keys. Other inputs of a
    functional model pair by name if each input has the name of a column, and by position otherwise.

    Parameters
    ----------
    model : keras.Model
        The model. Functional and sequential models define their inputs; other models define them
        when they are built. An unbuilt model of another kind gets one tensor or a tuple of several,
        or a dict if a functional model in it takes one. See `other_structure`.
    feature_cols : sequence of str
        One column per input.
    keys : sequence of str, optional
        Keys of the columns in the dict that a subclassed model takes, if known.
    by_name : bool
        False for saved models of an earlier version, which used only keys of dicts as names.

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
            f"feature_cols: the model has {len(inputs)} inputs "
            f"({', '.join(tensor.name for tensor in inputs)}), and there are {len(feature_cols)} "
            f"feature columns: {', '.join(feature_cols)}. Set one column per input.{hint}"
        )
    if isinstance(structure, Mapping) and len(structure) == len(inputs) > 1:
        _check_names(structure, feature_cols)
        return {name: _input_field(name, structure[name]) for name in structure}
    names = [tensor.name for tensor in inputs]
    columns = names if by_name and set(names) == set(feature_cols) else feature_cols
    flat = [_input_field(n, t) for n, t in zip(columns, inputs, strict=True)]
    return keras.tree.pack_sequence_as(structure, flat)


def other_structure(model: keras.Model, inputs: Any, feature_cols: Sequence[str]) -> Any:
    """Return the other input structure that a subclassed model may take; None if there is none."""
    if symbolic(model, "input") is not None or isinstance(model, keras.Sequential):
        return None
    return _positional(feature_cols) if isinstance(inputs, dict) else _named(feature_cols)


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
                f"feature_cols: the model takes a dict with the keys {', '.join(keys)}, and the "
                f"feature columns are {', '.join(feature_cols)}. Set one column per key."
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
            f"feature_cols: the model takes a dict with the keys {', '.join(map(str, keys))}, and "
            f"the feature columns are {', '.join(feature_cols)}. Inputs in a dict pair with "
            "columns by name: set feature_cols to the keys, and rename columns to them."
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
