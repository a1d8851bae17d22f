"""Models, optimizers, losses and metrics as bytes, custom classes and functions included.

Keras's own pickling writes names of classes only, which a process that does not have these classes
cannot read. Here the classes travel along. Loading runs code from the bytes. Used on both sides.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras

from hvd_estimators.data.columns import Array
from hvd_estimators.keras.backend import inner_optimizers

__all__ = [
    "OptimizerDocument",
    "dump",
    "dump_model",
    "find_custom_objects",
    "load",
    "load_model",
    "load_weights",
    "save_model",
]


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


def load_weights(model: keras.Model, document: bytes) -> None:
    """Load weights, and the optimizer's state where it is built, as Keras saved them.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    document : bytes
        Content of a ``.keras`` or ``.weights.h5`` file.
    """
    suffix = ".keras" if document.startswith(b"PK") else ".weights.h5"
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, f"model{suffix}")
        with open(path, "wb") as file:
            file.write(document)
        model.load_weights(path)


def dump_model(model: keras.Model, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a model as bytes without what it was compiled with."""
    found = find_custom_objects([model], custom_objects)
    return cloudpickle.dumps((save_model(model), found, None, _paths(model)))


def load_model(document: bytes) -> keras.Model:
    """Return what `dump_model` wrote."""
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
    """

    cls: type[keras.optimizers.Optimizer]
    config: Mapping[str, Any]
    state: Mapping[str, Array]
    custom_objects: Mapping[str, Any]

    @staticmethod
    def of(
        optimizer: keras.optimizers.Optimizer, custom_objects: Mapping[str, Any] | None = None
    ) -> OptimizerDocument:
        """Take an optimizer down."""
        state: dict[str, Array] = {}
        optimizer.save_own_variables(state)
        found = find_custom_objects([optimizer], custom_objects)
        return OptimizerDocument(type(optimizer), optimizer.get_config(), state, found)

    def make(self) -> keras.optimizers.Optimizer:
        """Return such an optimizer, without its state."""
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


def find_custom_objects(
    values: Sequence[Any], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return classes and functions that are not Keras's own and that a config may name.

    Parameters
    ----------
    values : sequence
        Models, optimizers, losses and metrics.
    given : mapping, optional
        Name to object; takes precedence.

    Returns
    -------
    dict
        Name, and name under which it is registered, to class or function: those that the values
        hold, those registered with ``keras.saving`` that their configs name, and those given.
    """
    registered = keras.saving.get_custom_objects()
    found: dict[str, Any] = {}
    for value in values:
        found.update({name: registered[name] for name in _strings(value) if name in registered})
        for part in _parts(value):
            candidates = [type(part), *_held(part)]
            for candidate in candidates:
                if _is_custom(candidate):
                    found[candidate.__name__] = candidate
                    found[keras.saving.get_registered_name(candidate)] = candidate
    return {name: entry for name, entry in found.items() if not _is_keras(entry)} | dict(
        given or {}
    )


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts in the config of a Keras object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _strings(entry)
    elif callable(getattr(value, "get_config", None)):
        yield from _strings(keras.saving.serialize_keras_object(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.Model):
        yield from value._flatten_layers()
    elif isinstance(value, keras.optimizers.Optimizer):
        yield value
        yield value._learning_rate
        for inner in inner_optimizers(value):
            if inner is not value:
                yield from _parts(inner)
    else:
        yield value


def _held(part: Any) -> list[Any]:
    """Return what a layer keeps in its attributes: activations, initializers, regularizers."""
    return [
        entry if isinstance(entry, types.FunctionType) else type(entry)
        for name, entry in getattr(part, "__dict__", {}).items()
        # Keras puts wrappers of a layer's own methods there.
        if not hasattr(type(part), name)
    ]


def _is_custom(candidate: Any) -> bool:
    if isinstance(candidate, types.FunctionType):
        return not _is_keras(candidate) and candidate.__name__ != "<lambda>"
    return isinstance(candidate, type) and not _is_keras(candidate) and _is_configurable(candidate)


def _is_configurable(cls: type) -> bool:
    # What a config names: layers, losses, schedules, initializers and the like.
    return callable(getattr(cls, "get_config", None)) and callable(
        getattr(cls, "from_config", None)
    )


def _is_keras(entry: Any) -> bool:
    return str(getattr(entry, "__module__", "")).partition(".")[0] == "keras"


class _Pickler(cloudpickle.Pickler):
    """Pickles Keras objects by class, config and state."""

    def __init__(self, buffer: io.BytesIO, custom_objects: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._custom_objects = custom_objects

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, keras.Model):
            return self._reduce_model(obj)
        if isinstance(obj, keras.optimizers.Optimizer):
            return _make_optimizer, (OptimizerDocument.of(obj, self._custom_objects),)
        if isinstance(obj, (keras.losses.Loss, keras.metrics.Metric)):
            found = find_custom_objects([obj], self._custom_objects)
            return _from_config, (type(obj), obj.get_config(), found)
        return super().reducer_override(obj)

    def _reduce_model(self, model: keras.Model) -> Any:
        found = find_custom_objects([model], self._custom_objects)
        compiled = None
        if model.compiled and isinstance(model.optimizer, keras.optimizers.Optimizer):
            compiled = dict(model._compile_config.config)
            # By compile() it may have been wrapped for mixed precision.
            compiled["optimizer"] = OptimizerDocument.of(model.optimizer, self._custom_objects)
        return _load_model, (save_model(model), found, compiled, _paths(model))


def _load_model(
    document: bytes,
    custom_objects: Mapping[str, Any],
    compiled: Mapping[str, Any] | None = None,
    paths: Sequence[str] = (),
) -> keras.Model:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        with open(path, "wb") as file:
            file.write(document)
        model = keras.saving.load_model(
            path, custom_objects=dict(custom_objects), compile=False, safe_mode=False
        )
    if len(model.variables) == len(paths):
        # Keras makes other ones, and a MultiOptimizer chooses by them.
        for variable, given in zip(model.variables, paths, strict=True):
            variable._path = given
    if compiled is not None:
        optimizer: OptimizerDocument = compiled["optimizer"]
        model.compile(**{**compiled, "optimizer": optimizer.make()})
        if model.trainable_variables:
            optimizer.restore(model.optimizer, model.trainable_variables)
    return model


def _paths(model: keras.Model) -> list[str]:
    return [variable.path for variable in model.variables]


def _make_optimizer(document: OptimizerDocument) -> keras.optimizers.Optimizer:
    return document.make()


def _from_config(cls: Any, config: Mapping[str, Any], custom_objects: Mapping[str, Any]) -> Any:
    with keras.saving.custom_object_scope(dict(custom_objects)):
        return cls.from_config(copy.deepcopy(dict(config)))
