"""Serialize models, optimizers, losses and metrics, with custom classes and functions.

Keras's own pickling writes only the names of classes, so a process without these classes cannot
load the result. This module serializes the classes, too. Loading runs code from the bytes. Used on
the driver and on workers.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import Unpickler, loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import has_own_compile, kept_random_state
from hvd_estimators.keras.custom_objects import (
    complete_config,
    complete_configs,
    find_custom_objects,
    make_object,
)
from hvd_estimators.keras.large_model import (
    LargeModel,
    has_only_values,
    raw_values,
    read_head,
    size_of,
    value_locations,
    write_file,
)
from hvd_estimators.keras.model_file import (
    load_folder,
    read_files,
    save_folder,
    uncompiled,
    write_files,
)
from hvd_estimators.keras.model_metadata import ModelMetadata

logger = logging.getLogger(__name__)

# For models above this size, unused copies are freed at once. The garbage collector does not know
# the copies' size.
_LARGE_BYTES = 2**26

_ZEROS_BYTES = 2**10


def dump(value: Any, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Serialize a value that may contain models, optimizers, losses and metrics.

    Parameters
    ----------
    value : object
        Any value that cloudpickle supports, including Keras objects.
    custom_objects : mapping, optional
        Name to class or function, in addition to those found in the value.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, dict(custom_objects or {})).dump(value)
    return buffer.getvalue()


def load(document: bytes) -> Any:
    """Load a value that `dump` serialized. Models are compiled as before."""
    return loads(document)


def load_uncompiled(document: bytes) -> tuple[keras.Model, Mapping[str, Any] | None]:
    """Load a model and its compile arguments from `dump`, without compiling the model.

    The optimizer in the arguments stays an `OptimizerPayload`. The arguments are None if the model
    was not compiled, or if the loaded model is already compiled.
    """
    unpickler = _Uncompiled(io.BytesIO(document))
    return unpickler.load(), unpickler.compiled


def dump_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Serialize a model without its compile arguments."""
    return dump(_saved(model, custom_objects), custom_objects)


def model_payload(
    model: keras.Model, custom_objects: Mapping[str, Any] | None = None
) -> bytes | LocalFile:
    """Serialize a model as `dump_model` does, or a large one to a file with mappable values."""
    large = _large_copy(model, custom_objects)
    if large is None:
        return dump_model(model, custom_objects)
    head, copy = large
    return write_file(dump(head, custom_objects), copy)


def load_model(document: bytes | os.PathLike[str], mapped: bool = False) -> keras.Model:
    """Load a model that `dump_model` or `model_payload` serialized.

    The model is compiled only if its config was incomplete or its class has its own ``compile``.

    Parameters
    ----------
    document : bytes or path
        The serialized model.
    mapped : bool
        Whether the weights stay in the file, on the CPU. Processes that load the same file then
        share one copy of the weights.
    """
    head, end = read_head(document)
    if isinstance(head, LargeModel):
        return head.load(document, end, mapped)
    return _load_model(*head)


def copy_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """Copy a model as `dump_model` and `load_model` do.

    The copy of a large model shares its memory until one of the two models changes.
    """
    large = _large_copy(model, custom_objects)
    return _saved_and_loaded(model, custom_objects)[1] if large is None else large[1]


class ModelPayload:
    """A compiled model that is sent to the ranks.

    The pickled content is the same as from `dump` or `model_payload`, in separate parts. The
    parts are not kept in memory. Large parts are plain arrays, so that they can be copied from file
    to file.

    Parameters
    ----------
    model : keras.Model
        Built, compiled, and not used by other code.
    custom_objects : mapping, optional
        As for `dump`.
    """

    def __init__(self, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> None:
        self._model: keras.Model | None = model
        self._custom_objects = dict(custom_objects or {})
        self._parts: tuple[Any, ...] = ()

    def load(self) -> keras.Model:
        """Return the compiled model. This method can be called only once.

        In other processes the model is a copy. The process that created this object gets the given
        model itself, compiled with copies of its losses and metrics.
        """
        model, parts = self._model, self._parts
        self._model, self._parts = None, ()
        if model is None:
            return _load_parts(*parts)
        optimizer, compiled = model.optimizer, compile_arguments(model)
        if compiled is not None and not has_own_compile(model):
            compiled = load(dump(compiled, self._custom_objects))
            model.compile(**{**compiled, "optimizer": optimizer})
            if model.trainable_variables and not optimizer.built:
                optimizer.build(model.trainable_variables)
        return model

    def __reduce__(self) -> Any:
        return _make_document, self._serialize()

    def _serialize(self) -> tuple[Any, ...]:
        model, custom_objects = self._model, self._custom_objects
        assert model is not None, "The model has been taken from the document."
        content: Any
        head: tuple[Any, ...]
        large = _large_copy(model, custom_objects)
        if large is None:
            content, objects, _, metadata = _saved(model, custom_objects)
            head = (objects, metadata)
        else:
            content, head = raw_values(large[1]), (large[0],)
        compiled, state = compile_arguments(model), None
        if compiled is not None:
            optimizer = OptimizerPayload.of(model.optimizer, custom_objects)
            state = optimizer.state
            compiled["optimizer"] = replace(optimizer, state={})
        return content, dump((*head, compiled), custom_objects), state


def _make_document(*parts: Any) -> ModelPayload:
    document = ModelPayload.__new__(ModelPayload)
    document._model, document._parts = None, parts
    return document


def _load_parts(content: Any, rest: bytes, state: Any) -> keras.Model:
    *head, compiled = load(rest)
    if isinstance(head[0], LargeModel):
        model = head[0].fill(content)
    else:
        custom_objects, metadata = head
        model = _load_model(content, custom_objects, None, metadata)
    if compiled is not None:
        compiled["optimizer"] = replace(compiled["optimizer"], state=state)
    _compile(model, compiled)
    return model


def _large_copy(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[LargeModel, keras.Model] | None:
    """Return a large model without its values, and a copy that shares the values' memory.

    Returns None for other models, which need Keras's files.
    """
    if size_of(model) < _LARGE_BYTES or not has_only_values(model):
        return None
    # The collector does not know the size of earlier copies.
    gc.collect()
    view, extras = uncompiled(model), dict[str, Any]()
    # The new model draws random numbers.
    with kept_random_state():
        try:
            with complete_configs(view, extras):
                objects = find_custom_objects([view], custom_objects)
                config = json.dumps(keras.saving.serialize_keras_object(view))
            objects.update(extras)
            head = LargeModel(config.encode(), objects, ModelMetadata.of(model))
            # The copy gets its own objects.
            own_objects: LargeModel = load(dump(head, custom_objects))
            copy = own_objects.make()
            metadata, pairs = head.metadata.paired(model, copy)
        except Exception as error:
            logger.debug("A large model is not made of its config alone", exc_info=error)
            return None
    for ours, theirs in pairs:
        theirs.assign(ours.value)
    return replace(head, metadata=metadata, values=value_locations(copy)), copy


_Saved = tuple[dict[str, Array], dict[str, Any], dict[str, Any] | None, ModelMetadata]


class _Pickler(cloudpickle.Pickler):
    """Pickler that stores models, optimizers and metrics by config, and losses by attributes."""

    def __init__(self, buffer: io.BytesIO, custom_objects: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._custom_objects = custom_objects

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return self._reduce_model(obj)
        if isinstance(obj, keras.optimizers.Optimizer):
            return _make_optimizer, (OptimizerPayload.of(obj, self._custom_objects),)
        if isinstance(obj, keras.metrics.Metric):
            return make_object, (type(obj), *complete_config(obj, self._custom_objects))
        if isinstance(obj, keras.losses.Loss):
            # Keras would pickle a config, from which a custom class may lack arguments.
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)

    def _reduce_model(self, model: keras.Model) -> Any:
        files, objects, _, metadata = _saved(model, self._custom_objects)
        compiled = compile_arguments(model)
        if compiled is not None:
            compiled["optimizer"] = OptimizerPayload.of(model.optimizer, self._custom_objects)
        return _load_model, (files, objects, compiled, metadata)


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """Return a model's compile arguments without the optimizer; None if it is not compiled."""
    if not model.compiled or not isinstance(model.optimizer, keras.optimizers.Optimizer):
        return None
    compiled = dict(model._compile_config.config)
    # compile() may have wrapped the optimizer for mixed precision.
    compiled.pop("optimizer", None)
    return compiled


def _saved(model: keras.Model, custom_objects: Mapping[str, Any] | None) -> _Saved:
    """Save a model to Keras's files, and check that a copy from these files equals it.

    Returns
    -------
    tuple
        The arguments of `_load_model`. The compile arguments are None, unless the model's class
        overrides ``compile``.

    Raises
    ------
    Exception
        If Keras cannot write or load the files, or the copy differs from the model.
    """
    saved, copy = _saved_and_loaded(model, custom_objects)
    del copy
    _collect(saved[0])
    return saved


def _saved_and_loaded(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[_Saved, keras.Model]:
    """Return the result of `_saved`, and the copy of the model."""
    extras: dict[str, Any] = {}
    # The optimizer is serialized separately, and its state is twice as large as the weights.
    view = uncompiled(model)
    # Loading draws random numbers.
    with kept_random_state(), tempfile.TemporaryDirectory() as directory:
        with complete_configs(view, extras):
            named = find_custom_objects([view], custom_objects)
            save_folder(view, directory)
        files = _undated(read_files(directory))
        _collect(files)
        named.update(extras)
        metadata, compiled = ModelMetadata.of(model), None
        if has_own_compile(model):
            compiled = compile_arguments(model)
            if compiled is not None:
                optimizer = OptimizerPayload.of(model.optimizer, custom_objects)
                compiled["optimizer"] = optimizer
        # The copy gets its own objects.
        document = dump((named, compiled, metadata), custom_objects)
        objects, arguments, given = load(document)
        copy = _load_folder(directory, objects, given)
        metadata = metadata.completed(model, copy)
        _compile(copy, arguments)
    return (files, named, compiled, metadata), copy


def _undated(files: dict[str, Array]) -> dict[str, Array]:
    """Remove the save date, so that the same model always has the same files.

    Otherwise, a model saved a second later would be sent to the executors and loaded again.
    """
    metadata = json.loads(files["metadata.json"].tobytes())
    metadata.pop("date_saved", None)
    return {**files, "metadata.json": np.frombuffer(json.dumps(metadata).encode(), np.uint8)}


def _collect(files: Mapping[str, Array]) -> None:
    """Free unused models whose files are large."""
    if sum(content.nbytes for content in files.values()) > _LARGE_BYTES:
        gc.collect()


def _load_folder(
    directory: str, custom_objects: Mapping[str, Any], metadata: ModelMetadata | None
) -> keras.Model:
    with metadata.policy() if metadata is not None else contextlib.nullcontext():
        model = load_folder(directory, custom_objects)
    if metadata is not None:
        metadata.apply(model)
    return model


def _load_model(
    document: Any,
    custom_objects: Mapping[str, Any] | None = None,
    compiled: Mapping[str, Any] | None = None,
    metadata: ModelMetadata | None = None,
) -> keras.Model:
    """Create a model from files, which are freed one by one, or from its pickled attributes."""
    if custom_objects is None:
        as_it_was: keras.Model = loads(document)
        return as_it_was
    with tempfile.TemporaryDirectory() as directory:
        write_files(document, directory)
        model = _load_folder(directory, custom_objects, metadata)
    _compile(model, compiled)
    return model


def _compile(model: keras.Model, compiled: Mapping[str, Any] | None) -> None:
    """Compile a model with its original arguments.

    If the model's class overrides ``compile``, only Keras's ``compile`` is called. The attributes
    that the override sets are serialized with the model.
    """
    if compiled is None:
        return
    optimizer: OptimizerPayload = compiled["optimizer"]
    compile_model = keras.Model.compile if has_own_compile(model) else type(model).compile
    compile_model(model, **{**compiled, "optimizer": optimizer.make()})
    if model.trainable_variables:
        optimizer.restore(model.optimizer, model.trainable_variables)


class _Uncompiled(Unpickler):
    """Unpickler that creates models without compiling them.

    Attributes
    ----------
    compiled : mapping or None
        Compile arguments of the last created model, which is the outermost model.
    """

    compiled: Mapping[str, Any] | None = None

    def find_class(self, module: str, name: str, /) -> Any:
        value = super().find_class(module, name)
        return self._load if value is _load_model else value

    def _load(
        self,
        document: Any,
        custom_objects: Mapping[str, Any] | None = None,
        compiled: Mapping[str, Any] | None = None,
        metadata: ModelMetadata | None = None,
    ) -> keras.Model:
        self.compiled = compiled
        return _load_model(document, custom_objects, None, metadata)


@dataclass(frozen=True)
class Zeros:
    """Placeholder for an array of zeros, such as an optimizer's slot before the first step."""

    shape: tuple[int, ...]
    dtype: Any


class _State(dict[str, Any]):
    """State that keeps large arrays of zeros as `Zeros`; reading one creates the array."""

    def __setitem__(self, name: str, value: Any) -> None:
        array = np.asarray(value)
        if array.nbytes >= _ZEROS_BYTES and not array.reshape(-1).view(np.uint8).any():
            value = Zeros(array.shape, array.dtype)
        super().__setitem__(name, value)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return np.zeros(value.shape, value.dtype) if isinstance(value, Zeros) else value


@dataclass(frozen=True)
class OptimizerPayload:
    """A serialized optimizer, from which an optimizer for other variables can be created.

    Attributes
    ----------
    cls : type
        Class of the optimizer.
    config : mapping
        Result of `complete_config`.
    state : mapping
        Values of its variables, by their position.
    custom_objects : mapping
        Classes and other objects that the config names.
    """

    cls: type[keras.optimizers.Optimizer]
    config: Mapping[str, Any]
    state: Mapping[str, Array | Zeros]
    custom_objects: Mapping[str, Any]

    @staticmethod
    def of(
        optimizer: keras.optimizers.Optimizer, custom_objects: Mapping[str, Any] | None = None
    ) -> OptimizerPayload:
        """Serialize an optimizer.

        Raises
        ------
        UnequalCopyError
            If a copy from the optimizer's config differs from it.
        """
        state = _State()
        optimizer.save_own_variables(state)
        config, objects = complete_config(optimizer, custom_objects)
        return OptimizerPayload(type(optimizer), config, state, objects)

    def make(self) -> keras.optimizers.Optimizer:
        """Return a new optimizer without state."""
        optimizer: keras.optimizers.Optimizer = make_object(
            self.cls, self.config, self.custom_objects
        )
        return optimizer

    def restore(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Build an optimizer for a model's variables, and restore its state if there is one."""
        if not optimizer.built:
            optimizer.build(list(variables))
        # The state of an optimizer that was never built has only its iterations and learning rate.
        if len(self.state) == len(optimizer.variables):
            optimizer.load_own_variables(_State(self.state))


def _make_optimizer(document: OptimizerPayload) -> keras.optimizers.Optimizer:
    return document.make()
