"""What a Keras rank adds to a run's checkpoint: the model's own file, and callbacks' states."""

from __future__ import annotations

import importlib
import types
import zipfile
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import IO, Any

import keras

from hvd_estimators.keras.files import write_archive
from hvd_estimators.training.encoding import is_encodable

__all__ = ["callback_state", "restore_callback", "save_file"]

_NOT_STATE: tuple[str, ...] = ("_model", "params")
_OF_FILES = ("append_header",)
"""What a callback finds out about its file when training begins."""


def save_file(model: keras.Model, file: str | IO[bytes]) -> None:
    """Write a model as a ``.keras`` file; `load_weights` reads it.

    Of a model without a config it is an archive with ``model.weights.h5``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        write_archive(model, archive)


def callback_state(callback: Any) -> dict[str, dict[str, Any]]:
    """Return the attributes of a callback that are plain values: counters, bests, best weights.

    Functions of Keras's own, by which values are compared, go by their names.
    """
    left_out = _NOT_STATE
    if isinstance(callback, keras.callbacks.CSVLogger):
        left_out = (*left_out, *_OF_FILES)
    attributes = {name: v for name, v in vars(callback).items() if name not in left_out}
    plain = {name: _plain(value) for name, value in attributes.items()}
    functions = {
        name: f"{value.__module__}:{value.__qualname__}"
        for name, value in attributes.items()
        if isinstance(value, types.FunctionType) and _function_of(value) is value
    }
    values = {name: value for name, value in plain.items() if is_encodable(value)}
    return {"values": values, "functions": functions}


def restore_callback(callback: Any, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give a callback back what `callback_state` returned, paths of another machine left out."""
    attributes = vars(callback)
    for name, value in state["values"].items():
        if not isinstance(value, str):
            attributes[name] = _like(attributes.get(name), value)
    for name, function in state["functions"].items():
        attributes[name] = _function(function)


def _plain(value: Any) -> Any:
    """Return a container of any kind as a list, tuple or dict."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(map(_plain, value))
    return value


def _like(given: Any, value: Any) -> Any:
    """Return a value as an object of the kind that a callback has made: a deque, for example."""
    if type(given) is type(value):
        return value
    if isinstance(given, MutableMapping) and isinstance(value, dict):
        given.clear()
        given.update(value)
        return given
    if isinstance(given, MutableSequence) and isinstance(value, list):
        given.clear()
        given.extend(value)
        return given
    if isinstance(given, tuple) and isinstance(value, tuple):
        return type(given)(*value)
    return value


def _function_of(value: types.FunctionType) -> Any:
    if not value.__module__.startswith("keras."):
        return None
    return _function(f"{value.__module__}:{value.__qualname__}")


def _function(name: str) -> Any:
    """Return a function of Keras's; None for one that cannot be found by its name."""
    module, _, path = name.partition(":")
    if not module.startswith("keras."):
        return None
    return getattr(importlib.import_module(module), path, None)
