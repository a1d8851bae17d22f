"""Models, optimizers, losses and metrics as bytes, custom classes and functions included.

Keras's own pickling writes names of classes only, which a process that does not have these classes
cannot read. Here the classes travel along. Loading runs code from the bytes. Used on both sides.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import pickle
import random
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_estimators.keras.backend import has_own_compile
from hvd_estimators.keras.custom_objects import find_custom_objects
from hvd_estimators.keras.states import (
    StatePickler,
    dump_state,
    same_attributes,
    same_optimizer,
    without_variables,
)
from hvd_estimators.keras.traits import Traits
from hvd_estimators.parquet.columns import Array

__all__ = [
    "OptimizerDocument",
    "dump",
    "dump_model",
    "load",
    "load_model",
    "load_weights",
    "save_model",
    "save_plainly",
]

logger = logging.getLogger(__name__)

_WEIGHTS = "model.weights.h5"
"""Also the name that Keras gives it within a ``.keras`` file."""


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
    return pickle.loads(document)


def save_model(model: keras.Model) -> bytes:
    """Return a model as the content of a ``.keras`` file."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        model.save(path)
        with open(path, "rb") as file:
            return file.read()


def save_plainly(model: keras.Model) -> dict[str, bytes]:
    """Return ``model.keras``, or ``model.weights.h5`` of a model without a config, by name."""
    try:
        return {"model.keras": save_model(model)}
    except (NotImplementedError, TypeError, ValueError):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, _WEIGHTS)
            model.save_weights(path)
            with open(path, "rb") as file:
                return {_WEIGHTS: file.read()}


def load_weights(model: keras.Model, document: bytes) -> None:
    """Load weights, and the optimizer's state where it is built, as Keras saved them.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    document : bytes
        Content of a ``.keras`` or ``.weights.h5`` file, or of an archive that holds the latter.
    """
    if document.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(document)) as archive:
            if "config.json" not in archive.namelist():
                document = archive.read(_WEIGHTS)
    suffix = ".keras" if document.startswith(b"PK") else ".weights.h5"
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, f"model{suffix}")
        with open(path, "wb") as file:
            file.write(document)
        model.load_weights(path)


def dump_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a model as bytes without what it was compiled with."""
    by_config = _by_config(model, custom_objects)
    if by_config is None:
        return cloudpickle.dumps((dump_state(model),))
    return cloudpickle.dumps((*by_config, None, Traits.of(model)))


def load_model(document: bytes) -> keras.Model:
    """Return what `dump_model` wrote; compiled, where its config did not tell all."""
    return _load_model(*pickle.loads(document))


@dataclass(frozen=True)
class OptimizerDocument:
    """An optimizer as plain values, of which another one is made for other variables.

    Attributes
    ----------
    cls : type
        Its class.
    config : mapping
        What ``get_config()`` returned.
    state : mapping
        Its variables, by their position.
    custom_objects : mapping
        Classes that the config names.
    document : bytes or None
        The optimizer as it is, where its config does not tell all.
    """

    cls: type[keras.optimizers.Optimizer]
    config: Mapping[str, Any]
    state: Mapping[str, Array]
    custom_objects: Mapping[str, Any]
    document: bytes | None = None

    @staticmethod
    def of(
        optimizer: keras.optimizers.Optimizer, custom_objects: Mapping[str, Any] | None = None
    ) -> OptimizerDocument:
        """Take an optimizer down."""
        state: dict[str, Array] = {}
        optimizer.save_own_variables(state)
        try:
            found = find_custom_objects([optimizer], custom_objects)
            document = OptimizerDocument(type(optimizer), optimizer.get_config(), state, found)
            if same_optimizer(optimizer, document.make()):
                return document
        except (NotImplementedError, TypeError, ValueError):
            pass
        return OptimizerDocument(type(optimizer), {}, state, {}, dump_state(optimizer))

    def make(self) -> keras.optimizers.Optimizer:
        """Return such an optimizer, without its state."""
        if self.document is not None:
            return without_variables(pickle.loads(self.document))
        with keras.saving.custom_object_scope(dict(self.custom_objects)):
            # Classes take out of the config what they have used.
            return self.cls.from_config(copy.deepcopy(dict(self.config)))

    def restore(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        """Build an optimizer for a model's variables and give it the state, where there is one."""
        if not optimizer.built:
            optimizer.build(list(variables))
        # One that was never built has no more than its iterations and its learning rate.
        if len(self.state) == len(optimizer.variables):
            optimizer.load_own_variables(dict(self.state))


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
        document = _by_config(model, self._custom_objects)
        if document is None:
            return _load_model, (dump_state(model),)
        compiled = None
        if model.compiled and isinstance(model.optimizer, keras.optimizers.Optimizer):
            compiled = dict(model._compile_config.config)
            # By compile() it may have been wrapped for mixed precision.
            compiled["optimizer"] = OptimizerDocument.of(model.optimizer, self._custom_objects)
        return _load_model, (*document, compiled, Traits.of(model))


def _by_config(
    model: keras.Model, custom_objects: Mapping[str, Any] | None
) -> tuple[bytes, dict[str, Any]] | None:
    """Return a model as a ``.keras`` file and its custom objects; None if these do not tell all."""
    if model.compiled and has_own_compile(model):
        # What it was compiled with is known to its own compile() only.
        return None
    # Loading draws numbers, which the user's shall not be.
    python, numpy = random.getstate(), np.random.get_state()
    try:
        found = find_custom_objects([model], custom_objects)
        document = save_model(model)
        if same_attributes(model, _load_model(document, found, None, Traits.of(model))):
            return document, found
    except Exception as error:
        logger.debug("A model has no config that makes another one", exc_info=error)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    return None


def _load_model(
    document: bytes,
    custom_objects: Mapping[str, Any] | None = None,
    compiled: Mapping[str, Any] | None = None,
    traits: Traits | None = None,
) -> keras.Model:
    if custom_objects is None:
        as_it_was: keras.Model = pickle.loads(document)
        return as_it_was
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        with open(path, "wb") as file:
            file.write(document)
        with traits.policy() if traits is not None else contextlib.nullcontext():
            model = keras.saving.load_model(
                path, custom_objects=dict(custom_objects), compile=False, safe_mode=False
            )
    if traits is not None:
        traits.give(model)
    if compiled is not None:
        optimizer: OptimizerDocument = compiled["optimizer"]
        model.compile(**{**compiled, "optimizer": optimizer.make()})
        if model.trainable_variables:
            optimizer.restore(model.optimizer, model.trainable_variables)
    return model


def _make_optimizer(document: OptimizerDocument) -> keras.optimizers.Optimizer:
    return document.make()
