"""Models, optimizers, losses and metrics as bytes, custom classes and functions included.

Keras's own pickling writes names of classes only, which a process that does not have these classes
cannot read. Here the classes travel along. Loading runs code from the bytes. Used on both sides.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import os
import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_estimators.keras.backend import has_own_compile
from hvd_estimators.keras.custom_objects import find_custom_objects
from hvd_estimators.keras.files import (
    WEIGHTS,
    load_folder,
    read_files,
    save_folder,
    uncompiled,
    write_files,
)
from hvd_estimators.keras.mapped import (
    MappedModel,
    mapped_file,
    read_head,
    size_of,
    stored_variables,
)
from hvd_estimators.keras.optimizer_state import OptimizerDocument
from hvd_estimators.keras.states import StatePickler, dump_state, same_attributes
from hvd_estimators.keras.traits import Traits
from hvd_estimators.parquet.columns import Array
from hvd_estimators.temporary import LocalFile
from hvd_estimators.unpickling import Unpickler, loads

__all__ = [
    "ModelDocument",
    "copy_model",
    "dump",
    "dump_model",
    "load",
    "load_model",
    "load_uncompiled",
    "model_document",
]

logger = logging.getLogger(__name__)

# Models of which copies that nobody uses any more are not left to wait for the garbage collector,
# which does not know how large they are.
_LARGE_BYTES = 2**26


def dump(value: Any, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a value as bytes; it may hold models, optimizers, losses and metrics.

    Parameters
    ----------
    value : object
        Anything that cloudpickle takes, and Keras objects in it.
    custom_objects : mapping, optional
        Name to class or function, beside those that are found in the value.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, dict(custom_objects or {})).dump(value)
    return buffer.getvalue()


def load(document: bytes) -> Any:
    """Return what `dump` wrote. Models are compiled as they were."""
    return loads(document)


def load_uncompiled(document: bytes) -> tuple[keras.Model, Mapping[str, Any] | None]:
    """Return a model that `dump` wrote, as `load_model` makes it, and what it was compiled with.

    Of the latter an optimizer is not made; None where the model was not compiled, or comes back
    compiled.
    """
    unpickler = _Uncompiled(io.BytesIO(document))
    return unpickler.load(), unpickler.compiled


def dump_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a model as bytes without what it was compiled with."""
    saved = _saved(model, custom_objects)
    if saved is None:
        return cloudpickle.dumps((dump_state(model),))
    return cloudpickle.dumps((*saved, None, Traits.of(model)))


def model_document(
    model: keras.Model, custom_objects: Mapping[str, Any] | None = None
) -> bytes | LocalFile:
    """Return what `dump_model` returns, or of a large model a file whose weights can be mapped."""
    if sum(map(size_of, model.weights)) < _LARGE_BYTES:
        return dump_model(model, custom_objects)
    found = _saved_and_loaded(model, custom_objects)
    if found is None:
        return cloudpickle.dumps((dump_state(model),))
    files, objects, stored, copy = found
    # Loading draws numbers, see there.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        file = mapped_file(model, copy, files, objects, stored)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    del found, copy
    _collect(files)
    return cloudpickle.dumps((files, objects, None, Traits.of(model))) if file is None else file


def load_model(document: bytes | os.PathLike[str], mapped: bool = False) -> keras.Model:
    """Return what `dump_model` or `model_document` wrote.

    It is compiled, where its config did not tell all.

    Parameters
    ----------
    document : bytes or path
        What was written.
    mapped : bool
        Leave the weights of a file where they are, on the CPU: processes that load the same file
        then have one copy of them between them.
    """
    parts, end = read_head(document)
    if isinstance(parts, MappedModel):
        return parts.load(document, end, mapped)
    return _load_model(*parts)


def copy_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> keras.Model:
    """Return what `load_model` makes of what `dump_model` returns."""
    saved = _saved_and_loaded(model, custom_objects)
    return _load_model(dump_state(model)) if saved is None else saved[-1]


class ModelDocument:
    """A compiled model on its way to the ranks.

    What is pickled of it is as what `dump` writes, in parts that are not kept and of which the
    large ones are plain arrays, so that they cross from file to file.

    Parameters
    ----------
    model : keras.Model
        Built, compiled, and nobody else's.
    custom_objects : mapping, optional
        As for `dump`.
    """

    def __init__(self, model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> None:
        self._model: keras.Model | None = model
        self._custom_objects = dict(custom_objects or {})
        self._has_config: bool | None = None
        self._parts: tuple[Any, ...] = ()

    def load(self) -> keras.Model:
        """Return the model, compiled; to be called once.

        It is a copy. Where its config tells all, the process that has made the document gets the
        given model itself, compiled with objects of its own.
        """
        model, parts = self._model, self._parts
        self._model, self._parts = None, ()
        if model is None:
            return _load_parts(*parts)
        if self._has_config is None:
            self._has_config = _saved(model, self._custom_objects) is not None
        if not self._has_config:
            return _load_model(dump_state(model))
        optimizer, compiled = model.optimizer, _compiled_with(model)
        if compiled is not None:
            compiled = load(dump(compiled, self._custom_objects))
            model.compile(**{**compiled, "optimizer": optimizer})
            if model.trainable_variables and not optimizer.built:
                optimizer.build(model.trainable_variables)
        return model

    def __reduce__(self) -> Any:
        return _make_document, self._take_down()

    def _take_down(self) -> tuple[Any, ...]:
        model = self._model
        assert model is not None, "The model has been taken from the document."
        saved = _saved(model, self._custom_objects)
        self._has_config = saved is not None
        if saved is None:
            return (dump_state(model),)
        files, custom_objects = saved
        compiled, state = _compiled_with(model), None
        if compiled is not None:
            optimizer = OptimizerDocument.of(model.optimizer, self._custom_objects)
            state = optimizer.state
            compiled["optimizer"] = replace(optimizer, state={})
        rest = dump((custom_objects, compiled, Traits.of(model)), self._custom_objects)
        return files, rest, state


def _make_document(*parts: Any) -> ModelDocument:
    document = ModelDocument.__new__(ModelDocument)
    document._model, document._parts = None, parts
    return document


def _load_parts(files: Any, rest: bytes | None = None, state: Any = None) -> keras.Model:
    if rest is None:
        return _load_model(files)
    custom_objects, compiled, traits = load(rest)
    if compiled is not None:
        compiled["optimizer"] = replace(compiled["optimizer"], state=state)
    return _load_model(files, custom_objects, compiled, traits)


class _Pickler(StatePickler):
    """Pickles models and optimizers by config and weights where these tell all."""

    def __init__(self, buffer: io.BytesIO, custom_objects: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._custom_objects = custom_objects

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return self._reduce_model(obj)
        if isinstance(obj, keras.optimizers.Optimizer):
            return _make_optimizer, (OptimizerDocument.of(obj, self._custom_objects),)
        return super().reducer_override(obj)

    def _reduce_model(self, model: keras.Model) -> Any:
        saved = _saved(model, self._custom_objects)
        if saved is None:
            return _load_model, (dump_state(model),)
        compiled = _compiled_with(model)
        if compiled is not None:
            compiled["optimizer"] = OptimizerDocument.of(model.optimizer, self._custom_objects)
        return _load_model, (*saved, compiled, Traits.of(model))


def _compiled_with(model: keras.Model) -> dict[str, Any] | None:
    """Return what a model was compiled with, but for the optimizer; None if it was not."""
    if not model.compiled or not isinstance(model.optimizer, keras.optimizers.Optimizer):
        return None
    compiled = dict(model._compile_config.config)
    # By compile() it may have been wrapped for mixed precision.
    compiled.pop("optimizer", None)
    return compiled


def _saved(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Return a model as Keras's files and its custom objects; None if these do not tell all."""
    found = _saved_and_loaded(model, custom_objects)
    if found is None:
        return None
    files, objects, _, copy = found
    del found, copy
    _collect(files)
    return files, objects


def _saved_and_loaded(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Array], dict[str, Any], int, keras.Model] | None:
    """Return what `_saved` does, how many variables the files have, and the model made of them."""
    if model.compiled and has_own_compile(model):
        # What it was compiled with is known to its own compile() only.
        return None
    # Loading draws numbers, which the user's shall not be.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        found = find_custom_objects([model], custom_objects)
        with tempfile.TemporaryDirectory() as directory:
            # The optimizer goes by itself, and its state is twice as large as the weights.
            save_folder(uncompiled(model), directory)
            files = _undated(read_files(directory))
            stored = stored_variables(os.path.join(directory, WEIGHTS))
            _collect(files)
            copy = _load_folder(directory, found, Traits.of(model))
        if same_attributes(model, copy):
            return files, found, stored, copy
    except Exception as error:
        logger.debug("A model has no config that makes another one", exc_info=error)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    return None


def _undated(files: dict[str, Array]) -> dict[str, Array]:
    """Return files that are the same whenever a model is written.

    Executors would be sent a model again for another second, and load it again.
    """
    metadata = json.loads(files["metadata.json"].tobytes())
    metadata.pop("date_saved", None)
    return {**files, "metadata.json": np.frombuffer(json.dumps(metadata).encode(), np.uint8)}


def _collect(files: Mapping[str, Array]) -> None:
    """Free models of the size of some files that nobody uses any more."""
    if sum(content.nbytes for content in files.values()) > _LARGE_BYTES:
        gc.collect()


def _load_folder(
    directory: str, custom_objects: Mapping[str, Any], traits: Traits | None
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
    traits: Traits | None = None,
) -> keras.Model:
    """Make a model of files, which are given up one by one, or of all its attributes."""
    if custom_objects is None:
        as_it_was: keras.Model = loads(document)
        return as_it_was
    with tempfile.TemporaryDirectory() as directory:
        write_files(document, directory)
        model = _load_folder(directory, custom_objects, traits)
    if compiled is not None:
        optimizer: OptimizerDocument = compiled["optimizer"]
        model.compile(**{**compiled, "optimizer": optimizer.make()})
        if model.trainable_variables:
            optimizer.restore(model.optimizer, model.trainable_variables)
    return model


class _Uncompiled(Unpickler):
    """Makes models without compiling them.

    Attributes
    ----------
    compiled : mapping or None
        What the model was compiled with that was made last, which is the outermost.
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
        traits: Traits | None = None,
    ) -> keras.Model:
        self.compiled = compiled
        return _load_model(document, custom_objects, None, traits)


def _make_optimizer(document: OptimizerDocument) -> keras.optimizers.Optimizer:
    return document.make()
