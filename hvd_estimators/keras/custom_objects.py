"""The custom classes and functions that a model's config may name. Used on both sides."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from hvd_estimators.keras.backend import all_layers, inner_optimizers
from hvd_estimators.keras.states import is_configurable, is_keras

__all__ = ["find_custom_objects"]


def find_custom_objects(
    values: Sequence[Any], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return classes and functions that a config may name, and that Keras does not find itself.

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
    return {name: e for name, e in found.items() if not _is_found(e)} | dict(given or {})


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in the config of a Keras object."""
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
        yield from all_layers(value)
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
        # Keras keeps wrappers of a layer's own methods there.
        if not hasattr(type(part), name)
    ]


def _is_custom(candidate: Any) -> bool:
    if isinstance(candidate, types.FunctionType):
        return not _is_found(candidate) and candidate.__name__ != "<lambda>"
    return not is_keras(candidate) and is_configurable(candidate)


def _is_found(entry: Any) -> bool:
    """Return whether Keras finds an entry by its name: its own, but functions of ``keras.ops``."""
    is_function = isinstance(entry, types.FunctionType)
    return is_keras(entry) and not (is_function and entry.__module__.startswith("keras.src.ops."))
