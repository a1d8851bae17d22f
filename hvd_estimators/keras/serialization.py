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
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators._util.unpickle_imports import Unpickler, loads
from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import has_own_compile
from hvd_estimators.keras.custom_objects import (
    complete_config,
    complete_configs,
    find_custom_objects,
    make_object,
)
from hvd_estimators.keras.mapped import (
    MappedModel,
    mapped_file,
    read_head,
    size_of,
    stored_variables,
)
from hvd_estimators.keras.model_file import (
    WEIGHTS,
    load_folder,
    read_files,
    save_folder,
    uncompiled,
    write_files,
)
from hvd_estimators.keras.model_metadata import ModelMetadata
from hvd_estimators.keras.optimizer_state import OptimizerPayload

__all__ = [
    "ModelPayload",
    "copy_model",
    "dump",
    "dump_model",
    "load",
    "load_model",
    "load_uncompiled",
    "model_payload",
]

logger = logging.getLogger(__name__)

# For models above this size, unused copies are freed at once. The garbage collector does not know
# the copies' size.
_LARGE_BYTES = 2**26


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
    saved = _saved(model, custom_objects)
    return dump((saved.files, saved.custom_objects, saved.compiled, saved.traits), custom_objects)


def model_payload(
    model: keras.Model, custom_objects: Mapping[str, Any] | None = None
) -> bytes | LocalFile:
    """Serialize a model as `dump_model` does, or a large one to a file with mappable weights."""
    if sum(map(size_of, model.weights)) < _LARGE_BYTES:
        return dump_model(model, custom_objects)
    saved, copy = _saved_and_loaded(model, custom_objects)
    # Loading draws random numbers, see `_saved_and_loaded`.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        file = mapped_file(model, copy, saved.files, saved.custom_objects, saved.stored, dump)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    del copy
    _collect(saved.files)
    if file is not None:
        return file
    return dump((saved.files, saved.custom_objects, saved.compiled, saved.traits), custom_objects)


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
    parts, end = read_head(document)
    if isinstance(parts, MappedModel):
        return parts.load(document, end, mapped)
    return _load_model(*parts)


def copy_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """Copy a model as `dump_model` and `load_model` do."""
    return _saved_and_loaded(model, custom_objects)[1]


class ModelPayload:
    """A compiled model that is sent to the ranks.

    The pickled content is the same as that of `dump`, in separate parts. The parts are not kept in
    memory. Large parts are plain arrays, so that they can be copied from file to file.

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
        optimizer, compiled = model.optimizer, _compiled_with(model)
        if compiled is not None and not has_own_compile(model):
            compiled = load(dump(compiled, self._custom_objects))
            model.compile(**{**compiled, "optimizer": optimizer})
            if model.trainable_variables and not optimizer.built:
                optimizer.build(model.trainable_variables)
        return model

    def __reduce__(self) -> Any:
        return _make_document, self._serialize()

    def _serialize(self) -> tuple[Any, ...]:
        model = self._model
        assert model is not None, "The model has been taken from the document."
        saved = _saved(model, self._custom_objects)
        compiled, state = _compiled_with(model), None
        if compiled is not None:
            optimizer = OptimizerPayload.of(model.optimizer, self._custom_objects)
            state = optimizer.state
            compiled["optimizer"] = replace(optimizer, state={})
        rest = dump((saved.custom_objects, compiled, saved.traits), self._custom_objects)
        return saved.files, rest, state


def _make_document(*parts: Any) -> ModelPayload:
    document = ModelPayload.__new__(ModelPayload)
    document._model, document._parts = None, parts
    return document


def _load_parts(files: Any, rest: bytes | None = None, state: Any = None) -> keras.Model:
    if rest is None:
        return _load_model(files)
    custom_objects, compiled, traits = load(rest)
    if compiled is not None:
        compiled["optimizer"] = replace(compiled["optimizer"], state=state)
    return _load_model(files, custom_objects, compiled, traits)


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
        saved = _saved(model, self._custom_objects)
        compiled = _compiled_with(model)
        if compiled is not None:
            compiled["optimizer"] = OptimizerPayload.of(model.optimizer, self._custom_objects)
        return _load_model, (saved.files, saved.custom_objects, compiled, saved.traits)


def _compiled_with(model: keras.Model) -> dict[str, Any] | None:
    """Return a model's compile arguments without the optimizer; None if it is not compiled."""
    if not model.compiled or not isinstance(model.optimizer, keras.optimizers.Optimizer):
        return None
    compiled = dict(model._compile_config.config)
    # compile() may have wrapped the optimizer for mixed precision.
    compiled.pop("optimizer", None)
    return compiled


@dataclass
class _Saved:
    """A model in Keras's files, with the properties that these files lack.

    Attributes
    ----------
    files : dict
        See `hvd_estimators.keras.model_file.read_files`.
    custom_objects : dict
        Name to class, function or constructor argument.
    traits : ModelMetadata
        Properties that the config does not restore.
    stored : int
        Number of variables in the weights file.
    compiled : dict or None
        Arguments of Keras's ``compile`` if the model's class overrides ``compile``.
    """

    files: dict[str, Array]
    custom_objects: dict[str, Any]
    traits: ModelMetadata
    stored: int
    compiled: dict[str, Any] | None


def _saved(model: keras.Model, custom_objects: Mapping[str, Any] | None) -> _Saved:
    """Save a model to Keras's files, and check that a copy from these files equals it.

    Raises
    ------
    Exception
        If Keras cannot write or load the files, or the copy differs from the model.
    """
    saved, copy = _saved_and_loaded(model, custom_objects)
    del copy
    _collect(saved.files)
    return saved


def _saved_and_loaded(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[_Saved, keras.Model]:
    """Return the result of `_saved`, and the copy of the model."""
    # Loading draws random numbers, which must not change the user's random state.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        held: dict[str, Any] = {}
        # The optimizer is serialized separately, and its state is twice as large as the weights.
        view = uncompiled(model)
        with tempfile.TemporaryDirectory() as directory:
            with complete_configs(view, held):
                found = find_custom_objects([view], custom_objects)
                save_folder(view, directory)
            files = _undated(read_files(directory))
            stored = stored_variables(os.path.join(directory, WEIGHTS))
            _collect(files)
            found.update(held)
            traits, compiled = ModelMetadata.of(model), None
            if has_own_compile(model):
                compiled = _compiled_with(model)
                if compiled is not None:
                    optimizer = OptimizerPayload.of(model.optimizer, custom_objects)
                    compiled["optimizer"] = optimizer
            # The copy gets its own objects.
            document = dump((found, compiled, traits), custom_objects)
            objects, arguments, given = load(document)
            copy = _load_folder(directory, objects, given)
        traits = traits.completed(model, copy)
        _compile(copy, arguments)
        return _Saved(files, found, traits, stored, compiled), copy
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


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
    directory: str, custom_objects: Mapping[str, Any], traits: ModelMetadata | None
) -> keras.Model:
    with traits.policy() if traits is not None else contextlib.nullcontext():
        model = load_folder(directory, custom_objects)
    if traits is not None:
        traits.give(model)
    return model


def _load_model(
    document: Any,
    custom_objects: Mapping[str, Any] | None = None,
    compiled: Mapping[str, Any] | None = None,
    traits: ModelMetadata | None = None,
) -> keras.Model:
    """Create a model from files, which are freed one by one, or from its pickled attributes."""
    if custom_objects is None:
        as_it_was: keras.Model = loads(document)
        return as_it_was
    with tempfile.TemporaryDirectory() as directory:
        write_files(document, directory)
        model = _load_folder(directory, custom_objects, traits)
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
        found = super().find_class(module, name)
        return self._load if found is _load_model else found

    def _load(
        self,
        document: Any,
        custom_objects: Mapping[str, Any] | None = None,
        compiled: Mapping[str, Any] | None = None,
        traits: ModelMetadata | None = None,
    ) -> keras.Model:
        self.compiled = compiled
        return _load_model(document, custom_objects, None, traits)


def _make_optimizer(document: OptimizerPayload) -> keras.optimizers.Optimizer:
    return document.make()


# The functions below read files of earlier versions, which pickled Keras objects by attributes.


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    nodes = state.get("_nodes")
    if isinstance(obj, keras.Model) and isinstance(nodes, list):
        # Keras names the nodes of a graph by the memory addresses of its operations.
        state["_nodes"] = {f"{id(operation)}_{rest}" for operation, rest in nodes}
    vars(obj).update(state)


def _set_tracker(tracker: Any, state: dict[str, Any]) -> None:
    vars(tracker).update(state)
    # Keras identifies tracked objects by their memory addresses.
    tracker.stored_ids = {
        name: {id(entry) for entry in entries} for name, (_, entries) in tracker.config.items()
    }


def _fill(tracked: Any, state: tuple[Any, Any]) -> None:
    # The tracker already knows the contents.
    tracked.tracker = None
    (tracked.extend if isinstance(tracked, list) else tracked.update)(state[1])
    tracked.tracker = state[0]


def _make_variable(value: Any, trainable: bool, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=trainable, name=name)


def _load_layer(cls: Any, config: dict[str, Any], assets: Mapping[str, bytes]) -> Any:
    layer = cls.from_config(config)
    with tempfile.TemporaryDirectory() as directory:
        for name, content in assets.items():
            with open(os.path.join(directory, name), "wb") as file:
                file.write(content)
        if assets:
            layer.load_assets(directory)
    return layer
