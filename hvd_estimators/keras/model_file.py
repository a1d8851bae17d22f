"""Read and write Keras's model files one variable at a time, also from copies in memory.

``Model.save`` holds a whole file in memory before it writes the file, and ``load_model`` reads the
whole file. This module reads and writes folders instead.

A ``.keras`` file stores a layer's kernel with the product of its LoRA adapters added, and omits the
adapters. The original values of such variables are written beside Keras's own files. So are the
positions of the variables that optimizers in attributes train, since Keras restores the state of a
built optimizer only.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import h5py
import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import StoreError
from hvd_estimators.keras.backend import (
    all_layers,
    build_optimizers,
    is_keras,
    model_optimizers,
    numpy_dtype,
    optimizer_positions,
    rated_optimizers,
    to_dense,
)
from hvd_estimators.keras.custom_objects import constructing
from hvd_estimators.store.files import CHUNK_BYTES

logger = logging.getLogger(__name__)

_VALUES = "hvd_estimators.variables.npz"
_OPTIMIZERS = "hvd_estimators.optimizers.json"


def loads_plainly(layer: keras.Layer) -> bool:
    """Return whether loading a layer only assigns values to its variables in order."""
    kind = type(layer)
    if hasattr(kind, "load_assets"):
        return False
    if kind.load_own_variables is keras.Layer.load_own_variables:
        return kind.save_own_variables is keras.Layer.save_own_variables
    # The overrides in Keras's own layers handle adapters and quantization, or set more than
    # variables.
    has_adapters = is_keras(kind.load_own_variables) and hasattr(kind, "enable_lora")
    is_quantized = layer.dtype_policy.quantization_mode is not None
    return has_adapters and not is_quantized and not getattr(layer, "lora_enabled", False)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's own variables, without its sublayers'."""
    inner = {id(v) for part in all_layers(layer, include_self=False) for v in part.variables}
    return [variable for variable in layer.variables if id(variable) not in inner]


def rewritten_variables(model: keras.Model) -> dict[int, Array]:
    """Return the variables of layers that Keras does not save and load unchanged, by position."""
    layers = [layer for layer in all_layers(model) if not loads_plainly(layer)]
    if not layers:
        return {}
    ids = {id(variable) for layer in layers for variable in own_variables(layer)}
    return {
        number: np.array(variable_value(variable))
        for number, variable in enumerate(model.variables)
        if id(variable) in ids
    }


@dataclass(frozen=True)
class ModelExtras:
    """Contents of a model's file that Keras does not write. Keras ignores them.

    Attributes
    ----------
    values : mapping
        Variables from `rewritten_variables`.
    positions : list of list of int
        From `optimizer_positions`.
    """

    values: Mapping[int, Array]
    positions: list[list[int]]

    @staticmethod
    def of(model: keras.Model) -> ModelExtras:
        """Return the current extras of a model."""
        return ModelExtras(rewritten_variables(model), optimizer_positions(model))

    def write(self, archive: zipfile.ZipFile) -> None:
        """Add the extras to an archive, if there are any."""
        if any(self.positions):
            archive.writestr(_OPTIMIZERS, json.dumps(self.positions))
        if self.values:
            # NumPy's files do not support bfloat16.
            contents = {str(n): v.reshape(-1).view(np.uint8) for n, v in self.values.items()}
            buffer = io.BytesIO()
            np.savez(buffer, **contents)
            archive.writestr(_VALUES, buffer.getvalue())

    def __bool__(self) -> bool:
        return bool(self.values) or any(self.positions)


def _build_optimizers(model: keras.Model, archive: zipfile.ZipFile) -> None:
    """Build the optimizers that were built when an archive was written."""
    if _OPTIMIZERS in archive.namelist():
        build_optimizers(model, json.loads(archive.read(_OPTIMIZERS)))


def _read_rewritten(model: keras.Model, archive: zipfile.ZipFile) -> None:
    """Assign the variables in `ModelExtras` to a model.

    Raises
    ------
    ValueError
        If the model has other variables.
    """
    if _VALUES not in archive.namelist():
        return
    variables = model.variables
    with np.load(io.BytesIO(archive.read(_VALUES))) as contents:
        for number in map(int, contents):
            content = contents[str(number)]
            if number >= len(variables):
                raise ValueError(f"The model has {len(variables)} variables, and the file more.")
            variable = variables[number]
            dtype = numpy_dtype(variable.dtype)
            variable.assign(content.view(dtype).reshape(tuple(variable.shape)))


def variable_value(variable: keras.Variable) -> Array:
    """Return a variable's value, read-only and without a copy if NumPy supports its type."""
    tensor = to_dense(variable.value)
    try:
        value = np.asarray(memoryview(tensor))
    except (TypeError, ValueError):  # such as bfloat16, and torch's tensors
        value = keras.ops.convert_to_numpy(tensor)
    return np.ascontiguousarray(value).reshape(tuple(variable.shape))


WEIGHTS = "model.weights.h5"
"""Name of the weights file, also inside a ``.keras`` file."""


# Larger files are mapped into memory.
_MAPPED_BYTES = 2**20


def uncompiled(model: keras.Model) -> keras.Model:
    """Return a view of a model that is not compiled.

    The view shares layers and variables with the model, which other threads may use meanwhile. Use
    the view only for saving, to leave the optimizer's state out of the file.
    """
    view: keras.Model = object.__new__(type(model))
    attributes = dict(vars(model))
    if "optimizer" in attributes:
        attributes["optimizer"] = None
    attributes.pop("_compile_config", None)
    attributes["compiled"] = False
    vars(view).update(attributes)
    return view


def save_folder(model: keras.Model, directory: str) -> None:
    """Write the content of a ``.keras`` file as separate files into an existing folder."""
    keras.saving.save_model(model, directory, zipped=False)
    for folder, _, _ in os.walk(directory, topdown=False):
        # A ``.keras`` file contains no empty folders, and loading checks if there are assets.
        if folder != directory and not os.listdir(folder):
            os.rmdir(folder)


def load_folder(directory: str, custom_objects: Mapping[str, Any]) -> keras.Model:
    """Return the model that `save_folder` wrote, not compiled."""
    with constructing(custom_objects) as made:
        return keras.saving.load_model(directory, made, compile=False, safe_mode=False)


def read_files(directory: str) -> dict[str, Array]:
    """Return the files of a folder as bytes, by their relative paths.

    The content of files above 1 MiB stays on the disk until it is used, even after the folder is
    deleted.
    """
    contents = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.getsize(path) > _MAPPED_BYTES:
                # A plain array is pickled without a copy.
                content: Array = np.asarray(np.memmap(path, np.uint8, mode="r"))
            else:
                content = np.fromfile(path, np.uint8)
            contents[os.path.relpath(path, directory)] = content
    return contents


def write_files(files: dict[str, Array], directory: str) -> None:
    """Write the files from `read_files` to a folder, and empty the dict."""
    while files:
        name, content = files.popitem()
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            content.tofile(file)


def save_file(model: keras.Model, file: str | IO[bytes], extras: ModelExtras | None = None) -> None:
    """Write a model and its optimizers' states as a ``.keras`` file, which `load_weights` reads.

    If the model has no config, the file is an archive that contains only ``model.weights.h5``.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    file : str or file
        The path, or a file open for writing.
    extras : ModelExtras, optional
        Default: the model's current extras.
    """
    with zipfile.ZipFile(file, "w") as archive:
        with tempfile.TemporaryDirectory() as folder:
            _save_plainly(model, folder)
            _zip(folder, archive)
        (ModelExtras.of(model) if extras is None else extras).write(archive)


def save_plainly(model: keras.Model, directory: str) -> str:
    """Write ``model.keras`` to a folder, or ``model.weights.h5`` if the model has no config.

    Returns
    -------
    str
        The path of the file.
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        if not _save_plainly(model, folder):
            return shutil.move(os.path.join(folder, WEIGHTS), directory)
        path = os.path.join(directory, "model.keras")
        with zipfile.ZipFile(path, "w") as archive:
            _zip(folder, archive)
        return path


def load_weights(model: keras.Model, source: str | IO[bytes]) -> None:
    """Load the weights that Keras saved, and the states of the model's optimizers.

    Parameters
    ----------
    model : keras.Model
        Built and compiled. Optimizers in its attributes are built here.
    source : str or file
        A ``.keras`` or ``.weights.h5`` file with any name, or an archive that contains the latter.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(source, "rb")) if isinstance(source, str) else source
        is_archive = file.read(2) == b"PK"
        file.seek(0)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        weights = os.path.join(directory, WEIGHTS)
        if is_archive:
            # Within an archive, every seek would read from the beginning.
            archive = stack.enter_context(zipfile.ZipFile(file))
            archive.extract(WEIGHTS, directory)
            _build_optimizers(model, archive)
        else:
            with open(weights, "wb") as copy:
                shutil.copyfileobj(file, copy, CHUNK_BYTES)
        model.load_weights(weights)
        if is_archive:
            _read_rewritten(model, archive)


def _save_plainly(model: keras.Model, directory: str) -> bool:
    """Write a model's files to a folder, and return whether they include its config."""
    try:
        save_folder(model, directory)
    except (NotImplementedError, TypeError, ValueError):
        shutil.rmtree(directory)
        os.mkdir(directory)
        model.save_weights(os.path.join(directory, WEIGHTS))
        return False
    return True


def _zip(directory: str, archive: zipfile.ZipFile) -> None:
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            inner = os.path.join(folder, name)
            archive.write(inner, os.path.relpath(inner, directory))


class _Written(threading.local):
    """Values that a thread writes instead of current ones, by id of layer or optimizer."""

    values: Mapping[int, Mapping[str, Array]] = {}


_written = _Written()


def snapshot(model: keras.Model) -> ModelCopy | None:
    """Copy the contents of a model's file into memory; return None if that is impossible.

    A copy is impossible if a layer saves additional files or requires Keras's own kind of store.
    """
    for layer in all_layers(model):
        save_assets = getattr(layer, "save_assets", None)
        if save_assets is not None and not is_keras(save_assets):
            return None
    try:
        return ModelCopy(model)
    except Exception as error:
        logger.debug("A checkpoint is written while training waits: %s", error)
        return None


class ModelCopy:
    """In-memory copy of all variables that a model's layers and optimizers save.

    The class does not clone the model, because Keras cannot clone every model. Instead the model
    itself is written. In the writing thread, its layers save the copied values instead of the
    current ones.

    Parameters
    ----------
    model : keras.Model
        The model, built and compiled.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values: dict[int, _Store] = {}
        self._extras = ModelExtras.of(model)
        for saver in [*all_layers(model), *model_optimizers(model), *rated_optimizers(model)]:
            if id(saver) not in self._values:
                store = _Store()
                saver.save_own_variables(store)
                self._values[id(saver)] = store
                _let_save_copies(saver)

    def save(self, file: IO[bytes]) -> None:
        """Write the file that `save_file` would have written at copy time. Runs in any thread."""
        _written.values = self._values
        try:
            save_file(self._model, file, self._extras)
        finally:
            _written.values = {}


class _Store(dict[str, Array]):
    """Store that copies each value that a layer saves, in place of one of Keras's stores."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, np.array(keras.ops.convert_to_numpy(value)))


def _let_save_copies(saver: Any) -> None:
    """Make a layer or an optimizer save its copied values in a thread that writes a copy."""
    # Bypasses Keras's attribute tracking, which would inspect the value.
    attributes = vars(saver)
    if "save_own_variables" in attributes:
        return
    save = saver.save_own_variables

    def save_own_variables(store: Any) -> None:
        values = _written.values.get(id(saver))
        if values is None:
            save(store)
        else:
            for name, value in values.items():
                store[name] = value

    attributes["save_own_variables"] = save_own_variables


def read_content(
    file: IO[bytes], safe: bool, custom_objects: Mapping[str, Any]
) -> keras.Model | dict[str, Array]:
    """Return the model with its optimizer, or its weights by name if it has no config.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Whether to reject code in the file, such as Lambda layers.
    custom_objects : mapping
        Name to custom class or function of the model.

    Raises
    ------
    StoreError
        If the model cannot be created from the file.
    """
    with tempfile.TemporaryDirectory() as directory:
        if not zipfile.is_zipfile(file):
            return _weights(file)
        with zipfile.ZipFile(file) as archive:
            if "config.json" not in archive.namelist():
                with open(archive.extract(WEIGHTS, directory), "rb") as weights:
                    return _weights(weights)
        path = os.path.join(directory, "model.keras")
        file.seek(0)
        with open(path, "wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
        try:
            model: keras.Model = keras.saving.load_model(
                path, custom_objects=dict(custom_objects), safe_mode=safe
            )
            with zipfile.ZipFile(path) as archive:
                _read_rewritten(model, archive)
            return model
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"Keras cannot create the model of the checkpoint ({error}). Set custom_objects if "
                "the model has your own classes or functions. Set safe=False if the file contains "
                "code, such as Lambda layers, and you trust its writer."
            ) from error


def _weights(file: IO[bytes]) -> dict[str, Array]:
    values: dict[str, Array] = {}

    def take(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset):
            values[name] = entry[()]

    file.seek(0)
    with h5py.File(file, "r") as weights:
        weights.visititems(take)
    return values
