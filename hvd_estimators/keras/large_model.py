"""Large Keras models as a config and raw values, so that few processes copy them.

A model is created from its config, with zeros that are never written and take no memory. Then the
raw values are assigned. A variable keeps the memory that is assigned to it. So a copy in the same
process shares the memory of the original, until one of them is changed. Processes that load the
same file share one copy in the page cache, since TensorFlow accepts mapped memory through DLPack.
Used on the driver and on workers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import load
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import (
    all_layers,
    has_own_compile,
    model_optimizers,
    numpy_dtype,
    on_tensorflow,
)
from hvd_estimators.keras.custom_objects import constructing
from hvd_estimators.keras.model_file import loads_plainly, variable_value
from hvd_estimators.keras.model_metadata import ModelMetadata

# Memory alignment that TensorFlow's kernels expect.
_ALIGNMENT = 64
# Smaller variables are copied, since only whole pages can be shared.
_ALIASED_BYTES = 2**16


@dataclass(frozen=True)
class _Value:
    """Location of a variable's value among all values.

    Attributes
    ----------
    offset : int
        Offset of its first byte from the beginning of the values.
    shape : tuple of int
    dtype : str
        TensorFlow's name of the type.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def of(self, raw: Array) -> Array:
        """Return the value of bytes, without a copy."""
        return raw.view(numpy_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class LargeModel:
    """A model without its values.

    Attributes
    ----------
    config : bytes
        The model's config, as JSON in Keras's format.
    custom_objects : mapping
        Name to class or function.
    metadata : ModelMetadata
        Properties that the config does not contain.
    values : tuple of _Value
        Locations of the variables' values, in the model's order.
    """

    config: bytes
    custom_objects: Mapping[str, Any]
    metadata: ModelMetadata
    values: tuple[_Value, ...] = ()

    def make(self) -> keras.Model:
        """Return the model with zeros that are not written, not compiled."""
        with (
            self.metadata.policy(),
            constructing(self.custom_objects) as made,
            _creating(lambda initial: True),
        ):
            model: keras.Model = keras.saving.deserialize_keras_object(
                json.loads(self.config), made, safe_mode=False
            )
        self.metadata.apply(model)
        return model

    def load(self, source: bytes | os.PathLike[str], start: int, mapped: bool) -> keras.Model:
        """Return the model of a file from `write_file`, not compiled.

        Parameters
        ----------
        source : bytes or path
            The file, or its whole content.
        start : int
            Offset of the first byte after the pickled head.
        mapped : bool
            Whether the values stay in the file, on the CPU. Variables can be changed: a page
            becomes private to the process when the page is written.
        """
        if isinstance(source, bytes):
            content: Array = np.frombuffer(source, np.uint8)
        else:
            content = np.asarray(np.memmap(os.fspath(source), np.uint8, mode="c"))
        content = content[_aligned(start) :]
        model = self.make()
        for variable, location in zip(model.variables, self.values, strict=True):
            value = location.of(content[location.offset : location.offset + location.num_bytes])
            is_aliased = mapped and not isinstance(source, bytes) and _can_alias(value)
            variable.assign(_alias(value) if is_aliased else value)
        return model

    def fill(self, raw: list[Array]) -> keras.Model:
        """Return the model with `raw_values`, which are freed one by one; not compiled."""
        model = self.make()
        raw.reverse()
        for variable, location in zip(model.variables, self.values, strict=True):
            variable.assign(location.of(raw.pop()))
        return model


def has_only_values(model: keras.Model) -> bool:
    """Return whether a config and the values of variables reproduce a model.

    Keras's files contain more, if layers have their own loading or attributes hold optimizers.
    """
    return (
        all(map(loads_plainly, all_layers(model)))
        and not has_own_compile(model)
        and all(optimizer is model.optimizer for optimizer in model_optimizers(model))
    )


def raw_values(model: keras.Model) -> list[Array]:
    """Return the values of a model's variables as bytes, without a copy."""
    return [variable_value(v).reshape(-1).view(np.uint8) for v in model.variables]


def value_locations(model: keras.Model) -> tuple[_Value, ...]:
    """Return the locations of a model's values in a file from `write_file`."""
    locations, offset = [], 0
    for variable in model.variables:
        location = _Value(offset, tuple(variable.shape), variable.dtype)
        locations.append(location)
        offset = _aligned(offset + location.num_bytes)
    return tuple(locations)


def write_file(head: bytes, model: keras.Model) -> LocalFile:
    """Write a file of a pickled `LargeModel` and the model's values."""
    local = LocalFile()
    with open(local.path, "wb") as file:
        file.write(head)
        _pad(file)
        for raw in raw_values(model):
            raw.tofile(file)
            _pad(file)
    return local


def read_head(source: bytes | os.PathLike[str]) -> tuple[Any, int]:
    """Load the pickled head of a file, or of its whole content; also return the head's end."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        return load(file), file.tell()


def size_of(model: keras.Model) -> int:
    """Return the size of a model's variables in bytes."""
    return sum(location.num_bytes for location in value_locations(model))


@contextlib.contextmanager
def unwritten_zeros() -> Iterator[None]:
    """Create variables whose initial value is zero without memory until they are written."""
    with _creating(_is_zero):
        yield


def _creating(is_replaced: Callable[[Any], bool]) -> contextlib.AbstractContextManager[Any]:
    """Create variables by `_create` in the block, which torch does not need."""
    if not on_tensorflow():
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.variable_creator_scope(functools.partial(_create, is_replaced))


def _can_alias(value: Array) -> bool:
    # NumPy does not support DLPack for other types.
    return on_tensorflow() and value.nbytes >= _ALIASED_BYTES and value.dtype.kind in "fiu"


def _alias(value: Array) -> Any:
    """Return a tensor that shares an array's memory."""
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(value.__dlpack__())


def _create(
    is_replaced: Callable[[Any], bool],
    next_creator: Callable[..., Any],
    **given: Any,
) -> Any:
    """Create a variable of zeros that take no memory, if its initial value is to be replaced."""
    import tensorflow as tf

    initializer = given.get("initial_value")
    # If an initializer's shape or type is unknown in a graph, the initializer runs as usual.
    with contextlib.suppress(Exception):
        if callable(initializer):
            # A graph computes nothing until it runs.
            with tf.Graph().as_default():
                initial = initializer()
                is_replaced_here = is_replaced(initial)
            zeros = _zeros(initial.shape.as_list(), initial.dtype.as_numpy_dtype)
            if is_replaced_here and _can_alias(zeros):
                given = {**given, "initial_value": _alias(zeros)}
    return next_creator(**given)


def _is_zero(initial: Any) -> bool:
    import tensorflow as tf

    return initial.op.type == "Fill" and tf.get_static_value(initial.op.inputs[1]) == 0


def _zeros(shape: Sequence[int], dtype: Any) -> Array:
    """Return aligned zeros, for which NumPy gets unwritten memory from the system."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _pad(file: IO[bytes]) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))
