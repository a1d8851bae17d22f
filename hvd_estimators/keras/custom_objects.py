"""Config of an object of the user's classes, and the objects beside it.

Keras writes names of classes and functions into a config. The classes and functions themselves
travel beside it. So do the constructor's arguments of a class without its own ``get_config()``,
which are read from the attributes of the same names.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.saving.serialization_lib import ObjectSharingScope

from hvd_estimators.keras.backend import VARIABLE, all_layers, inner_optimizers, is_keras

_HELD = "held"
"""Key of a replaced config: the entry that holds the object, or its class and arguments."""

_STANDIN = "hvd_estimators>standin"

_COMPILED_WITH = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)
"""Parts that are no part of a layer's config. A class's own compile() makes attributes of them."""

# Threads that fit the same model share its layers.
_lock = threading.RLock()


class UnequalCopyError(ValueError):
    """A copy differs from the original; the message names the difference."""


@dataclass(frozen=True)
class Description:
    """Config of a model, metric or optimizer, without values of variables.

    Attributes
    ----------
    config : mapping
        Keras's config. Objects of classes without their own ``get_config()`` refer to ``held``.
    held : mapping
        Objects without variables; otherwise, class and arguments of an object.
    objects : mapping
        Name, and registered name, to class or function.
    """

    config: Mapping[str, Any]
    held: Mapping[str, tuple[Any, Any]]
    objects: Mapping[str, Any]

    @staticmethod
    def of(value: Any, custom_objects: Mapping[str, Any] | None = None) -> Description:
        """Describe an object.

        Raises
        ------
        UnequalCopyError
            If a class has no ``get_config()``, and an argument of its constructor is not found.
        Exception
            If Keras makes no config.
        """
        held: dict[str, tuple[Any, Any]] = {}
        objects: dict[str, Any] = {}
        changed: list[Any] = []
        with _lock:
            try:
                # The base class of an optimizer writes the config of its schedule.
                for part in sorted(_parts(value), key=_has_variables):
                    _replace_methods(part, held, changed)
                    objects.update(_named(part))
                with ObjectSharingScope():
                    config = keras.saving.serialize_keras_object(value)
            finally:
                for part in changed:
                    vars(part).pop("get_config", None)
                    vars(part).pop("get_compile_config", None)
        # The model's document builds it.
        config.pop("build_config", None)
        registered = keras.saving.get_custom_objects()
        objects.update({name: registered[name] for name in _strings(config) if name in registered})
        return Description(_redirected(config), held, {**objects, **(custom_objects or {})})

    def make(self) -> Any:
        """Return a new object."""
        scope = {**self.objects, _STANDIN: _Standin(self.held)}
        with keras.saving.custom_object_scope(scope), ObjectSharingScope():
            # Classes may change the config that they get.
            config = copy.deepcopy(dict(self.config))
            return keras.saving.deserialize_keras_object(config, safe_mode=False)


class _Standin:
    """Entry of configs for all classes without their own ``get_config()``."""

    def __init__(self, held: Mapping[str, tuple[Any, Any]]) -> None:
        self._held = held

    def from_config(self, config: Mapping[str, Any]) -> Any:
        """Return the object that a `Description` holds, or make it."""
        kind, held = self._held[config[_HELD]]
        if kind is None:
            return held
        arguments = config["arguments"]
        made = {n: keras.saving.deserialize_keras_object(v) for n, v in arguments.items()}
        return kind(**made, **held)


def _replace_methods(part: Any, held: dict[str, tuple[Any, Any]], changed: list[Any]) -> None:
    """Let an object return a config that refers to ``held``, if its class has none."""
    if isinstance(part, keras.Model):
        changed.append(part)
        # This bypasses Keras's attribute tracking.
        vars(part)["get_compile_config"] = lambda: None
    if not _is_custom(type(part)) or not is_keras(type(part).get_config):
        return
    key, arguments = str(len(held)), {}
    if _has_variables(part):
        found = _constructor_arguments(part)
        if found is None:
            return
        arguments = {n: value for n, value in found.items() if _is_of_config(value)}
        others = {n: value for n, value in found.items() if n not in arguments}
        held[key] = (type(part), others)
    else:
        held[key] = (None, part)
    changed.append(part)
    vars(part)["get_config"] = lambda: {_HELD: key, "arguments": arguments}


def _has_variables(part: Any) -> bool:
    return isinstance(part, (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer))


def _redirected(config: Any) -> Any:
    """Let configs that refer to ``held`` name the stand-in instead of their class."""
    if isinstance(config, (list, tuple)):
        return type(config)(map(_redirected, config))
    if not isinstance(config, dict):
        return config
    config = {key: _redirected(value) for key, value in config.items()}
    inner = config.get("config")
    if isinstance(inner, dict) and inner.keys() == {_HELD, "arguments"}:
        config |= {"module": None, "class_name": _STANDIN, "registered_name": _STANDIN}
    return config


def _constructor_arguments(part: Any) -> dict[str, Any] | None:
    """Return the arguments to make an object again; None if Keras's own config has them."""
    kind = type(part)
    if is_keras(kind.__init__) or not is_keras(kind.from_config):
        return None
    known, own = _known_to_keras(part), vars(part)
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= {"name": part.name, **known} | arguments
        elif name == "name":
            arguments[name] = part.name
        elif name in known:
            arguments[name] = known[name]
        elif name == "dtype":
            arguments[name] = part.dtype_policy if isinstance(part, keras.Layer) else part.dtype
        elif name in own or f"_{name}" in own:
            arguments[name] = own.get(name, own.get(f"_{name}"))
        # The variables and outputs of a layer are compared later.
        elif parameter.default is parameter.empty or not isinstance(part, keras.Layer):
            raise UnequalCopyError(
                f"{kind.__name__} has no get_config(), and no attribute with the name of its "
                f"constructor's argument {name!r}; write self.{name} = {name} in the constructor"
            )
    if any(isinstance(entry, keras.KerasTensor) for entry in keras.tree.flatten(arguments)):
        return None
    return arguments


def _known_to_keras(part: Any) -> dict[str, Any]:
    """Return the arguments that Keras knows: a layer's simple ones, or the base class's config."""
    if not isinstance(part, keras.Layer):
        return dict(type(part).get_config(part))
    # Of models, Keras knows only defaults.
    known = None if isinstance(part, keras.Model) else part._auto_config
    return {} if known is None else dict(known.config)


def _parts(value: Any) -> Iterator[Any]:
    """Yield an object, what it consists of, and their attributes."""
    owners = [value]
    if isinstance(value, keras.Layer):
        owners = all_layers(value)
    elif isinstance(value, keras.optimizers.Optimizer):
        owners += inner_optimizers(value)
    for owner in owners:
        yield owner
        for name, part in list(vars(owner).items()):
            is_compiled_with = isinstance(owner, keras.Layer) and isinstance(part, _COMPILED_WITH)
            # Keras stores wrappers of a layer's own methods among its attributes.
            if not is_compiled_with and not hasattr(type(owner), name):
                yield part


def _is_custom(kind: Any) -> bool:
    """Return whether an entry is a class of the user that a config can name."""
    methods = (getattr(kind, name, None) for name in ("get_config", "from_config"))
    return isinstance(kind, type) and not is_keras(kind) and all(map(callable, methods))


def _named(part: Any) -> dict[str, Any]:
    """Return the class or function of a part by the names that a config has for it."""
    entry = part if isinstance(part, types.FunctionType) else type(part)
    if isinstance(entry, types.FunctionType):
        # Keras finds its own functions by name, except functions of ``keras.ops``.
        is_found = is_keras(entry) and not entry.__module__.startswith("keras.src.ops.")
        if is_found or entry.__name__ == "<lambda>":
            return {}
    elif not _is_custom(entry):
        return {}
    return {entry.__name__: entry, keras.saving.get_registered_name(entry): entry}


def _strings(config: Any) -> Iterator[str]:
    """Yield all strings in a config."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, (Mapping, list, tuple)):
        for entry in config.values() if isinstance(config, Mapping) else config:
            yield from _strings(entry)


def _leaves(value: Any) -> list[Any]:
    try:
        return list(keras.tree.flatten(value))
    except (TypeError, ValueError):
        return [value]


def _is_of_config(value: Any) -> bool:
    """Return whether a value contains layers, or a part of a config that Keras has made."""
    is_config = isinstance(value, dict) and "class_name" in value
    return is_config or any(isinstance(leaf, keras.Layer) for leaf in _leaves(value))


def differing_attributes(original: keras.Layer, copied: keras.Layer) -> dict[str, Any]:
    """Return the attributes of a layer that its copy lacks, and plain values that differ.

    Layers, variables and symbolic tensors, which calls leave behind, are not included.
    """
    if is_keras(type(original)):
        return {}
    found = {}
    for name, value in list(vars(original).items()):
        # Keras stores wrappers of a layer's own methods among its attributes.
        if name in _names_of_keras() or callable(getattr(type(original), name, None)):
            continue
        if name not in vars(copied):
            is_sent = all(map(_is_sent, _leaves(value)))
        else:
            is_sent = _is_other(value, vars(copied)[name])
        if is_sent:
            found[name] = value
    return found


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Return the names of attributes that Keras itself sets on layers and models."""
    inputs = keras.Input((1,))
    functional, subclassed, layer = keras.Model(inputs, inputs), keras.Model(), keras.Layer()
    for model in (functional, subclassed):
        model.compile("sgd", "mse", metrics=["mae"])
    layer.build((1,))
    parts = (functional, subclassed, keras.Sequential(), layer)
    return frozenset({"history"}.union(*map(vars, parts)))


def _is_sent(leaf: Any) -> bool:
    if isinstance(leaf, (keras.Layer, keras.Variable, VARIABLE, keras.random.SeedGenerator)):
        return False
    if keras.ops.is_tensor(leaf) and not hasattr(leaf, "numpy"):
        return False
    return isinstance(leaf, _COMPILED_WITH) or not is_keras(type(leaf))


def _is_other(ours: Any, theirs: Any) -> bool:
    """Return whether an attribute is of plain values, and another one differs."""
    plain = (bool, int, float, str, bytes, type(None), np.ndarray, np.generic)
    own, others = _leaves(ours), _leaves(theirs)
    return all(isinstance(leaf, plain) for leaf in own) and not (
        len(own) == len(others) and all(map(np.array_equal, own, others))
    )
