"""Variables that Keras's files hold in another form, such as LoRA adapters. Used on both sides.

A ``.keras`` file holds a layer's kernel with the product of its LoRA adapters added, and no
adapters. Such variables are written beside Keras's own files, as they are.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.states import is_keras
from hvd_estimators.parquet.columns import Array

__all__ = [
    "loads_plainly",
    "own_variables",
    "read_rewritten",
    "rewritten_variables",
    "variable_value",
    "write_rewritten",
]

_MEMBER = "hvd_estimators.variables.npz"


def loads_plainly(layer: keras.Layer) -> bool:
    """Return whether loading does no more to a layer than to assign to its variables in turn."""
    kind = type(layer)
    if hasattr(kind, "load_assets"):
        return False
    if kind.load_own_variables is keras.Layer.load_own_variables:
        return kind.save_own_variables is keras.Layer.save_own_variables
    # What Keras's own layers have of their own is for these two, or sets more than variables.
    has_adapters = is_keras(kind.load_own_variables) and hasattr(kind, "enable_lora")
    is_quantized = layer.dtype_policy.quantization_mode is not None
    return has_adapters and not is_quantized and not getattr(layer, "lora_enabled", False)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Return the variables of a layer that are not those of layers below it."""
    inner = {id(v) for part in all_layers(layer, include_self=False) for v in part.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def rewritten_variables(model: keras.Model) -> dict[int, Array]:
    """Return the variables, by position, of the layers that do not save and load plainly."""
    layers = [layer for layer in all_layers(model) if not loads_plainly(layer)]
    if not layers:
        return {}
    found = {id(variable) for layer in layers for variable in own_variables(layer)}
    return {
        number: np.array(variable_value(variable))
        for number, variable in enumerate(model.variables)
        if id(variable) in found
    }


def write_rewritten(values: Mapping[int, Array], archive: zipfile.ZipFile) -> None:
    """Add variables to an archive, if there are any. Keras leaves other members alone."""
    if values:
        # NumPy's files know no bfloat16.
        contents = {str(n): value.reshape(-1).view(np.uint8) for n, value in values.items()}
        buffer = io.BytesIO()
        np.savez(buffer, **contents)
        archive.writestr(_MEMBER, buffer.getvalue())


def read_rewritten(model: keras.Model, archive: zipfile.ZipFile) -> None:
    """Give a model the variables that `write_rewritten` wrote.

    Raises
    ------
    ValueError
        If the model has other variables.
    """
    if _MEMBER not in archive.namelist():
        return
    variables = model.variables
    with np.load(io.BytesIO(archive.read(_MEMBER))) as contents:
        for number in map(int, contents):
            content = contents[str(number)]
            if number >= len(variables):
                raise ValueError(f"The model has {len(variables)} variables, and the file more.")
            variable = variables[number]
            dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
            variable.assign(content.view(dtype).reshape(tuple(variable.shape)))


def variable_value(variable: keras.Variable) -> Array:
    """Return a variable's value, which is not to be written to; a copy only of what NumPy lacks."""
    tensor = tf.convert_to_tensor(variable)
    try:
        value = np.asarray(memoryview(tensor))
    except ValueError:  # such as bfloat16
        value = tensor.numpy()
    return np.ascontiguousarray(value).reshape(tuple(variable.shape))
