"""Recipe of a Keras object: its config and the user's classes in it, or the user's function.

Keras writes names of classes and functions into a config. The classes and functions themselves
travel beside it.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras.src.saving.serialization_lib import ObjectSharingScope

from hvd_estimators.keras.backend import all_layers, inner_optimizers, is_keras

_MADE = "hvd_estimators>made"
"""Name of the object's own class in a config."""

_FUNCTION = "hvd_estimators_function"
"""Attribute of models that a function of the user has made."""


_COMPILED_WITH = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)
"""Parts that are no part of a layer's config."""


class UnequalCopyError(ValueError):
    """A copy differs from the original; the message names the difference."""


def remember(model: keras.Model, function: Callable[[], keras.Model]) -> None:
    """Let copies of a model be made by the function that has made it."""
    # This bypasses Keras's attribute tracking.
    vars(model)[_FUNCTION] = function


def is_remembered(model: keras.Model) -> bool:
    """Return whether a function of the user has made a model."""
    return _FUNCTION in vars(model)


@dataclass(frozen=True)
class Recipe:
    """Recipe to make a model, metric or optimizer again, without values of variables.

    Attributes
    ----------
    maker : type or callable
        Its class, or the user's function.
    config : mapping or None
        Keras's config of it; None for a function or class that makes it without arguments.
    objects : mapping
        Name, and registered name, to class or function.
    excluded : tuple of (re.Pattern or None)
        For each inner optimizer, the names of variables that do not decay.
    """

    maker: Callable[..., Any]
    config: Mapping[str, Any] | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[Any, ...] = ()

    @staticmethod
    def of(value: Any, custom_objects: Mapping[str, Any] | None = None) -> Recipe:
        """Return the recipe of an object.

        Raises
        ------
        UnequalCopyError
            If a config lacks arguments of the constructor.
        Exception
            If Keras makes no config.
        """
        if _FUNCTION in vars(value):
            return Recipe(vars(value)[_FUNCTION])
        if isinstance(value, keras.Model) and _is_made_without_config(type(value)):
            _check_constructor(value)
            return Recipe(type(value))
        objects: dict[str, Any] = {}
        for part in _parts(value):
            objects.update(_named(part))
            # Keras records the arguments of layers, and variables replace initial values.
            if not isinstance(part, (keras.Layer, keras.Initializer)):
                _check_config(part)
        with ObjectSharingScope():
            config = value.get_config()
        return Recipe(type(value), config, {**objects, **(custom_objects or {})}, _excluded(value))

    def make(self) -> Any:
        """Return a new object."""
        if self.config is None:
            made = self.maker()
            remember(made, self.maker)
            return made
        # Classes may change the config that they get.
        config = copy.deepcopy(dict(self.config))
        named = {"module": None, "class_name": _MADE, "registered_name": _MADE, "config": config}
        scope = {**self.objects, _MADE: self.maker}
        with keras.saving.custom_object_scope(scope), ObjectSharingScope():
            made = keras.saving.deserialize_keras_object(named, safe_mode=False)
        if any(self.excluded):
            for optimizer, pattern in zip(inner_optimizers(made), self.excluded, strict=True):
                vars(optimizer)["_exclude_from_weight_decay_pattern"] = pattern
        return made


def _excluded(value: Any) -> tuple[Any, ...]:
    """Return the patterns of ``exclude_from_weight_decay``, which Keras's configs lack.

    Raises
    ------
    UnequalCopyError
        If variables were given, which copies do not have.
    """
    if not isinstance(value, keras.optimizers.Optimizer):
        return ()
    parts = [vars(optimizer) for optimizer in inner_optimizers(value)]
    if any(part.get("_exclude_from_weight_decay") for part in parts):
        raise UnequalCopyError(
            "exclude_from_weight_decay(var_list=...) names variables of one model, and the ranks "
            "train copies of it; give var_names"
        )
    return tuple(part.get("_exclude_from_weight_decay_pattern") for part in parts)


def _is_made_without_config(kind: type) -> bool:
    """Return whether a model's class has a constructor, and Keras's config.

    A constructor that takes any arguments passes a graph to Keras's, which has a config of it.
    """
    methods = (kind.get_config, kind.from_config)  # type: ignore[attr-defined]
    constructor = kind.__init__  # type: ignore[misc]
    takes_any = inspect.getfullargspec(constructor).varargs is not None
    return not is_keras(constructor) and not takes_any and all(map(is_keras, methods))


def _arguments(part: Any) -> list[inspect.Parameter]:
    """Return the named arguments of a constructor, if an object's config is Keras's own."""
    kind = type(part)
    # Also false for classes that have no config at all.
    has_kerass = is_keras(getattr(kind, "get_config", None))
    if not has_kerass or is_keras(kind) or is_keras(kind.__init__):
        return []
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    is_open = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.kind not in is_open and p.name not in ("name", "dtype")]


def _check_config(part: Any) -> None:
    """Reject an object of a user's class whose config, which is Keras's, loses an argument."""
    config = part.get_config() if _arguments(part) else {}
    for parameter in _arguments(part):
        if parameter.name not in config:
            raise _lacking(part, parameter)


def _check_constructor(model: keras.Model) -> None:
    """Reject a model whose class makes another one without arguments, as far as attributes tell."""
    for parameter in _arguments(model):
        value = vars(model).get(parameter.name, parameter.default)
        if parameter.default is parameter.empty or not np.array_equal(value, parameter.default):
            raise _lacking(model, parameter)


def _lacking(part: Any, parameter: inspect.Parameter) -> UnequalCopyError:
    return UnequalCopyError(
        f"{type(part).__name__} has no get_config() with its constructor's argument "
        f"{parameter.name!r}; write def get_config(self): return {{**super().get_config(), "
        f"{parameter.name!r}: ...}}"
    )


def _parts(value: Any) -> Iterator[Any]:
    """Yield an object, what it consists of, and their attributes."""
    owners = [value]
    if isinstance(value, keras.Layer):
        owners = all_layers(value)
    elif isinstance(value, keras.optimizers.Optimizer):
        owners += inner_optimizers(value)
    for owner in owners:
        yield owner
        left_out = _COMPILED_WITH if isinstance(owner, keras.Layer) else ()
        for name, part in list(vars(owner).items()):
            # Keras stores wrappers of a layer's own methods among its attributes.
            if not isinstance(part, left_out) and not hasattr(type(owner), name):
                yield part


def _named(part: Any) -> dict[str, Any]:
    """Return the class or function of a part by the names that a config has for it."""
    entry = part if isinstance(part, types.FunctionType) else type(part)
    if isinstance(entry, types.FunctionType):
        # Keras finds its own functions by name, except functions of ``keras.ops``.
        is_found = is_keras(entry) and not entry.__module__.startswith("keras.src.ops.")
        if is_found or entry.__name__ == "<lambda>":
            return {}
    elif is_keras(entry) or not callable(getattr(entry, "get_config", None)):
        return {}
    return {entry.__name__: entry, keras.saving.get_registered_name(entry): entry}
