"""Load large Keras models from files whose weights stay mapped in memory.

Processes that load the same file share one copy of the weights in the page cache. TensorFlow
accepts mapped memory through DLPack, and a variable keeps the memory that is assigned to it. The
model is therefore created from its config, with zero weights that are never written and take no
memory. Then the file's weights are assigned to the model. The bytes are the same as without
mapping, and so are the predictions. Used on the driver and on workers.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import load
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import all_layers
from hvd_estimators.keras.custom_objects import constructing
from hvd_estimators.keras.model_file import WEIGHTS, loads_plainly, variable_value
from hvd_estimators.keras.model_metadata import ModelMetadata, same_bits

__all__ = ["MappedModel", "mapped_file", "read_head", "size_of", "stored_variables"]

logger = logging.getLogger(__name__)

_PLAIN_FILES = {"config.json", "metadata.json", WEIGHTS}
# Memory alignment that TensorFlow's kernels expect.
_ALIGNMENT = 64
# Smaller variables are copied, since only whole pages can be shared.
_ALIASED_BYTES = 2**16


@dataclass(frozen=True)
class _Weight:
    """Location of a variable in the file.

    Attributes
    ----------
    offset : int
        Offset of its first byte from the beginning of the weights.
    shape : tuple of int
    dtype : str
        TensorFlow's name of the type.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str

    def of(self, weights: Array) -> Array:
        """Return this variable's value as a view of all weights, without a copy."""
        dtype = np.dtype(tf.as_dtype(self.dtype).as_numpy_dtype)
        size = math.prod(self.shape) * dtype.itemsize
        return weights[self.offset : self.offset + size].view(dtype).reshape(self.shape)


@dataclass(frozen=True)
class MappedModel:
    """Pickled head of a model file; the weights follow it.

    Attributes
    ----------
    config : bytes
        The model's config, as JSON in Keras's format.
    custom_objects : mapping
        Name to class or function.
    traits : ModelMetadata
        Properties that the config does not contain.
    weights : tuple of _Weight
        Locations of the weights, in the model's order.
    """

    config: bytes
    custom_objects: Mapping[str, Any]
    traits: ModelMetadata
    weights: tuple[_Weight, ...]

    def load(self, source: bytes | os.PathLike[str], start: int, aliased: bool) -> keras.Model:
        """Return the model, not compiled.

        Parameters
        ----------
        source : bytes or path
            The file, or its whole content.
        start : int
            Offset of the first byte after the pickled head.
        aliased : bool
            Whether the weights stay in the file, on the CPU. Weights can be changed: a page becomes
            private to the process when the page is written.
        """
        if isinstance(source, bytes):
            whole: Array = np.frombuffer(source, np.uint8)
            aliased = False
        else:
            whole = np.asarray(np.memmap(os.fspath(source), np.uint8, mode="c"))
        values = whole[_aligned(start) :]
        model = self.empty(unwritten=aliased)
        for variable, weight in zip(model.weights, self.weights, strict=True):
            value = weight.of(values)
            variable.assign(_alias(value) if aliased and _can_alias(value) else value)
        return model

    def empty(self, unwritten: bool) -> keras.Model:
        """Return the model without its weights, which take no memory if they are unwritten."""
        config = json.loads(self.config)
        config["compile_config"] = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.traits.policy())
            made = stack.enter_context(constructing(self.custom_objects))
            if unwritten:
                stack.enter_context(tf.variable_creator_scope(_unwritten))
            model: keras.Model = keras.saving.deserialize_keras_object(
                config, made, safe_mode=False
            )
        self.traits.give(model)
        return model


def mapped_file(
    model: keras.Model,
    loaded: keras.Model,
    files: Mapping[str, Array],
    custom_objects: Mapping[str, Any],
    stored: int,
    dump: Callable[[Any], bytes],
) -> LocalFile | None:
    """Write a file with a `MappedModel` as its head; return None for unsuitable models.

    A model is unsuitable if its config and the values of its weights do not reproduce it.

    Parameters
    ----------
    model : keras.Model
        Built.
    loaded : keras.Model
        The model that Keras loads from the files.
    files : mapping
        The model's files, see `hvd_estimators.keras.model_file.read_files`.
    custom_objects : mapping
        Name to class or function.
    stored : int
        Number of weights in the files.
    dump : callable
        Serializes the head.
    """
    if set(files) != _PLAIN_FILES or stored != len(model.weights):
        return None
    if not all(map(loads_plainly, all_layers(model))) or not _same_values(model, loaded):
        return None
    weights, offset = [], 0
    for variable in model.weights:
        value = variable_value(variable)
        weights.append(_Weight(offset, value.shape, tf.as_dtype(value.dtype).name))
        offset = _aligned(offset + value.nbytes)
    config = files["config.json"].tobytes()
    head = MappedModel(config, dict(custom_objects), ModelMetadata.of(model), tuple(weights))
    if not _makes(head, model):
        return None
    local = LocalFile()
    with open(local.path, "wb") as file:
        file.write(dump(head))
        _pad(file)
        for variable in model.weights:
            variable_value(variable).tofile(file)
            _pad(file)
    return local


def read_head(source: bytes | os.PathLike[str]) -> tuple[Any, int]:
    """Load the pickled head of a file, or of its whole content; also return the head's end."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        return load(file), file.tell()


def size_of(variable: keras.Variable) -> int:
    """Return the size of a variable's value in bytes."""
    return math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size)


def stored_variables(path: str) -> int:
    """Return the number of variables in a file of weights."""
    found: list[str] = []

    def note(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset):
            found.append(name)

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return len(found)


def _same_values(model: keras.Model, loaded: keras.Model) -> bool:
    """Return whether two models have the same weights bit for bit, in the same order."""
    ours, theirs = model.weights, loaded.weights
    return len(ours) == len(theirs) and all(
        same_bits(variable_value(a), variable_value(b)) for a, b in zip(ours, theirs, strict=True)
    )


def _makes(head: MappedModel, model: keras.Model) -> bool:
    """Return whether the config alone creates a model with the same shapes and types of weights."""
    try:
        made = head.empty(unwritten=True).weights
    except Exception as error:
        logger.debug("A model is not made of its config alone", exc_info=error)
        return False
    ours = [(tuple(v.shape), str(v.dtype)) for v in model.weights]
    return ours == [(tuple(v.shape), str(v.dtype)) for v in made]


def _can_alias(value: Array) -> bool:
    # NumPy does not support DLPack for other types.
    return value.nbytes >= _ALIASED_BYTES and value.dtype.kind in "fiu"


def _alias(value: Array) -> tf.Tensor:
    """Return a tensor that shares an array's memory."""
    return tf.experimental.dlpack.from_dlpack(value.__dlpack__())


def _unwritten(next_creator: Callable[..., tf.Variable], **given: Any) -> tf.Variable:
    """Create a variable of zeros that take no memory until they are written."""
    initial = given.get("initial_value")
    # If an initializer's shape or type is unknown in a graph, the initializer runs as usual.
    with contextlib.suppress(Exception):
        if callable(initial):
            # A graph computes nothing until it runs.
            with tf.Graph().as_default():
                made = initial()
            zeros = np.zeros(made.shape.as_list(), made.dtype.as_numpy_dtype)
            if _can_alias(zeros):
                given = {**given, "initial_value": _alias(zeros)}
    return next_creator(**given)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))
