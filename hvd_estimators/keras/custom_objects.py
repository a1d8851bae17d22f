"""Configs of custom classes and functions.

Keras creates an object from its config by ``cls(**config)``. For a class without its own
``get_config()``, Keras knows only simple constructor arguments. Keras also passes ``name`` or
``dtype`` to many constructors that accept neither.

In this module, the config of such a layer, metric or optimizer consists of the constructor's
arguments, read from the attributes of the same names. Attributes that the program set later are
sent alongside the config. Other objects without a config, such as schedules and initializers, hold
no variables and are pickled as Python objects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
import threading
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_estimators.keras.backend import VARIABLE, all_layers, inner_optimizers, is_keras

# Keras writes these into every layer's config.
_BASE_KEYS = ("name", "trainable", "dtype")

_ARGUMENTS = "hvd_estimators_arguments"

_ATTRIBUTES = "hvd_estimators_attributes"

_BUILT = "hvd_estimators_built"

_BUILDS = "hvd_estimators_builds"

_HELD = "hvd_estimators_held"

_OBJECT = "hvd_estimators_object"

_PLAIN_TYPES = (bool, int, float, str, bytes, type(None))


# Types that are restored by a model's config, its variables and its building.
_STRUCTURE = (keras.Layer, keras.Variable, VARIABLE, keras.random.SeedGenerator)

_MADE_BY_BUILDING = ("lora_enabled",)


# A class's own compile() stores these as attributes.
_COMPILED_WITH = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


# Keras objects that hold variables, which Python's pickle would copy with Keras's records of them.
_WITH_VARIABLES = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)


# Threads that fit the same model share its layers.
_lock = threading.RLock()


class UnequalCopyError(ValueError):
    """A copy differs from the original; the message names the difference."""


def _is_configurable(entry: Any) -> bool:
    """Return whether an entry is a class that configs can name, such as a layer or loss."""
    return isinstance(entry, type) and all(
        callable(getattr(entry, name, None)) for name in ("get_config", "from_config")
    )


def complete_config(
    value: Any, custom_objects: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a metric or optimizer, and the objects that the config names.

    Raises
    ------
    UnequalCopyError
        If an object made from the config has other attributes.
    Exception
        If the config makes no object.
    """
    extras: dict[str, Any] = {}
    with complete_configs(value, extras):
        objects = find_custom_objects([value], custom_objects)
        config = keras.saving.serialize_keras_object(value)["config"]
    objects.update(extras)
    _check_attributes(value, make_object(type(value), config, objects))
    return config, objects


def make_object(cls: Any, config: Mapping[str, Any], custom_objects: Mapping[str, Any]) -> Any:
    """Return the object of a config from `complete_config`."""
    with constructing(custom_objects):
        # from_config() may remove entries from the config.
        return _Maker(cls, custom_objects).from_config(copy.deepcopy(dict(config)))


@contextlib.contextmanager
def complete_configs(value: Any, extras: dict[str, Any]) -> Iterator[None]:
    """Make custom objects return complete configs from ``get_config()``.

    Parameters
    ----------
    value : keras.Model, keras.metrics.Metric or keras.optimizers.Optimizer
        The object, whose parts are included.
    extras : dict
        Receives the data attributes, the arguments that contain no Keras objects, and the objects
        that are pickled. The caller sends the dict alongside the config.
    """
    changed = []
    with _lock:
        try:
            # A base class's get_config() serializes its parts, so pickled parts come first.
            for part in sorted(_parts(value), key=_is_pickled, reverse=True):
                extra: dict[str, Any] = {}
                if _is_pickled(part):
                    changed.append(part)
                    extra[_OBJECT] = _add_extra(part, extras)
                    vars(part)["get_config"] = functools.partial(dict, extra)
                    continue
                arguments = _arguments(part)
                attributes = data_attributes(part) if isinstance(part, keras.Layer) else {}
                if arguments is not None:
                    extra[_ARGUMENTS] = _with_extras(arguments, extras)
                if attributes:
                    extra[_ATTRIBUTES] = _add_extra(attributes, extras)
                builds = _builds_of_parts(part)
                if any(builds):
                    extra[_BUILDS] = builds
                changed.append(part)
                # Bypasses Keras's attribute tracking.
                vars(part)["get_config"] = functools.partial(_config, part, extra)
                if _has_no_shapes(part):
                    extra[_BUILT] = True
                    vars(part)["get_build_config"] = lambda: None
            yield
        finally:
            for part in changed:
                vars(part).pop("get_config", None)
                vars(part).pop("get_build_config", None)


def _has_no_shapes(part: Any) -> bool:
    """Return whether Keras recorded no build shape, as for a model without ``call()``."""
    if not isinstance(part, keras.Layer):
        return False
    config = keras.Layer.get_build_config(part) or {}
    shapes = config.get("shapes_dict", config)
    return bool(shapes) and all(shape is None for shape in shapes.values())


def _builds_of_parts(part: Any) -> list[dict[str, Any] | None]:
    """Return the build configs of an unbuilt layer's layers, which Keras would omit."""
    if not isinstance(part, keras.Layer) or part.built:
        return []
    layers = all_layers(part, include_self=False)
    return [layer.get_build_config() if layer.built else None for layer in layers]


def data_attributes(part: Any) -> dict[str, Any]:
    """Return the attributes of a custom object that are data, not part of the model's structure.

    Data are numbers, text, arrays, functions, losses, metrics, optimizers and objects of custom
    classes, also in containers. Values that cannot be pickled are left out.
    """
    return {name: value for name, value in _own_attributes(part) if _is_data(value, name)}


def set_attributes(part: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes that an object lacks, and data attributes with another value."""
    for name, value in attributes.items():
        if name not in vars(part) or (
            not _holds_keras(value) and not _is_same(value, vars(part)[name])
        ):
            setattr(part, name, value)


def _check_attributes(original: Any, made: Any) -> None:
    """Check that a metric or optimizer has the settings of the original."""
    ignored: Set[str] = frozenset()
    if isinstance(original, keras.metrics.Metric):
        ignored = _metric_names()
    elif isinstance(original, keras.optimizers.Optimizer):
        ignored = set(vars(keras.optimizers.SGD())) - {"_learning_rate"}
    if is_keras(type(original)):
        ignored = vars(original).keys() - {"_learning_rate"}
    for name, value in vars(original).items():
        if name in ignored or _holds_variables(value):
            continue
        if not _is_same(value, vars(made).get(name)):
            raise UnequalCopyError(
                f"a copy of {type(original).__name__} has another value of the attribute {name!r}"
            )


def _holds_variables(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_variables, value))
    return isinstance(value, keras.Variable)


def _is_same(ours: Any, theirs: Any, depth: int = 0) -> bool:
    """Return whether two attributes are equal; variables and Keras's objects are not compared."""
    if ours is theirs or depth > 6:
        return True
    if isinstance(ours, (VARIABLE, keras.Variable, keras.Layer)):
        return theirs is not None
    if isinstance(ours, (list, tuple)):
        return (
            isinstance(theirs, (list, tuple))
            and len(ours) == len(theirs)
            and all(_is_same(a, b, depth + 1) for a, b in zip(ours, theirs, strict=True))
        )
    if isinstance(ours, Mapping):
        return (
            isinstance(theirs, Mapping)
            and ours.keys() == theirs.keys()
            and all(_is_same(value, theirs[key], depth + 1) for key, value in ours.items())
        )
    if isinstance(ours, (np.ndarray, np.generic, float)):
        return bool(np.array_equal(ours, theirs, equal_nan=np.asarray(ours).dtype.kind == "f"))
    if ours is None or isinstance(ours, (bool, int, str, bytes, set, frozenset)):
        return bool(ours == theirs)
    if isinstance(ours, (types.FunctionType, type)):
        return getattr(ours, "__qualname__", "") == getattr(theirs, "__qualname__", None)
    if type(ours).__qualname__ != type(theirs).__qualname__:
        return False
    if is_keras(type(ours)) or not hasattr(ours, "__dict__"):
        return True
    ignored = _metric_names() if isinstance(ours, keras.metrics.Metric) else frozenset()
    return all(
        name in ignored or (name in vars(theirs) and _is_same(value, vars(theirs)[name], depth + 1))
        for name, value in vars(ours).items()
    )


@functools.cache
def _metric_names() -> frozenset[str]:
    """Return the names of attributes that Keras itself sets on metrics."""
    return frozenset(vars(keras.metrics.Metric()))


@functools.cache
def _base_names() -> frozenset[str]:
    """Return the names of attributes that Keras itself sets on layers and models."""
    inputs = keras.Input((1,))
    functional = keras.Model(inputs, inputs)
    subclassed = keras.Model()
    for model in (functional, subclassed):
        model.compile("sgd", "mse", metrics=["mae"])
    layer = keras.Layer()
    layer.build((1,))
    names = {"history"}  # which training leaves
    for entry in (functional, subclassed, keras.Sequential(), layer):
        names.update(vars(entry))
    return frozenset(names)


def missing_attributes(original: Any, copy: Any) -> list[str]:
    """Return the attributes of a custom object that its copy lacks, except symbolic tensors.

    Tracing leaves symbolic tensors behind.
    """
    return [
        name
        for name, value in _own_attributes(original)
        if name not in vars(copy) and not any(map(_is_symbolic, keras.tree.flatten(value)))
    ]


def _own_attributes(part: Any) -> Iterator[tuple[str, Any]]:
    if is_keras(type(part)):
        return
    ignored = _base_names() if isinstance(part, keras.Layer) else ()
    for name, value in list(vars(part).items()):
        # Keras stores wrappers of a layer's methods among its attributes.
        if name in ignored or callable(getattr(type(part), name, None)):
            continue
        if not _is_internal(value):
            yield name, value


def _is_internal(value: Any) -> bool:
    """Return whether a value is a helper object of Keras, such as evaluate()'s iterator."""
    kind = type(value)
    is_part = isinstance(value, (*_STRUCTURE, keras.KerasTensor, list, tuple, dict, set))
    return is_keras(kind) and not is_part and not _is_configurable(kind)


def _is_data(value: Any, name: str) -> bool:
    if name in _MADE_BY_BUILDING:
        return False
    try:
        leaves = keras.tree.flatten(value)
    except (TypeError, ValueError):
        leaves = [value]
    if not all(map(_is_data_leaf, leaves)):
        return False
    if all(type(leaf) in _PLAIN_TYPES for leaf in leaves):
        return True
    try:
        _DataPickler(io.BytesIO()).dump(value)
    except Exception:
        return False
    return True


class _DataPickler(cloudpickle.Pickler):
    """Pickler that rejects parts of a model, and omits objects that are serialized by config."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (*_COMPILED_WITH, keras.Model)):
            return str, ()
        if isinstance(obj, _STRUCTURE):
            raise pickle.PicklingError
        return super().reducer_override(obj)


def _is_data_leaf(leaf: Any) -> bool:
    if isinstance(leaf, _STRUCTURE) or _is_symbolic(leaf):
        return False
    if isinstance(leaf, (types.FunctionType, type, *_COMPILED_WITH)):
        return True
    return not is_keras(type(leaf))


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, keras.KerasTensor) or (
        keras.ops.is_tensor(leaf) and not hasattr(leaf, "numpy")
    )


def _holds_keras(value: Any) -> bool:
    return any(isinstance(leaf, _COMPILED_WITH) for leaf in keras.tree.flatten(value))


def _config(part: Any, extra: dict[str, Any]) -> dict[str, Any]:
    if _ARGUMENTS in extra:
        return dict(extra)
    kind = type(part)
    config = dict(kind.get_config(part))
    if is_keras(kind.from_config) and not is_keras(kind.__init__):
        # A get_config() may omit arguments that the constructor requires.
        automatic = _automatic(part)
        for name in inspect.signature(kind.__init__).parameters:
            if name in automatic and name not in _BASE_KEYS:
                config.setdefault(name, automatic[name])
    return {**config, **extra}


def _add_extra(value: Any, extras: dict[str, Any]) -> str:
    key = f"{_HELD}.{len(extras)}"
    extras[key] = value
    return key


@contextlib.contextmanager
def constructing(custom_objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Let Keras create custom objects from the configs that `complete_configs` wrote.

    Yields the custom objects for Keras.

    Parameters
    ----------
    custom_objects : mapping
        Name to class or function, and the values that `complete_configs` extras.
    """
    makers = {
        name: _Maker(entry, custom_objects) if _is_configurable(entry) else entry
        for name, entry in custom_objects.items()
    }
    registered = keras.saving.get_custom_objects()
    with _lock, keras.saving.custom_object_scope(makers):
        # Registered classes take precedence over a scope.
        replaced = {name: registered[name] for name in makers if name in registered}
        registered.update({name: makers[name] for name in replaced})
        try:
            yield makers
        finally:
            registered.update(replaced)


class _Maker:
    """Proxy that lets Keras create objects of a class from constructor arguments as well.

    Parameters
    ----------
    cls : type
        The class.
    custom_objects : mapping
        Holds arguments and attributes that were sent alongside the config.
    """

    def __init__(self, cls: type, custom_objects: Mapping[str, Any]) -> None:
        self._cls = cls
        self._custom_objects = custom_objects
        self.__name__ = cls.__name__

    def from_config(self, config: dict[str, Any]) -> Any:
        """Create an object of the class."""
        if _OBJECT in config:
            return self._custom_objects[config[_OBJECT]]
        config = dict(config)
        attributes, arguments = config.pop(_ATTRIBUTES, None), config.pop(_ARGUMENTS, None)
        is_built, builds = config.pop(_BUILT, False), config.pop(_BUILDS, ())
        if arguments is not None:
            made = self._construct(arguments)
        else:
            cls: Any = self._cls
            made = cls.from_config(_accepted(cls, config))
        if attributes is not None:
            set_attributes(made, self._custom_objects[attributes])
        if is_built:
            made.built = True
        layers = all_layers(made, include_self=False) if builds else []
        if len(layers) == len(builds):
            for layer, build in zip(layers, builds, strict=True):
                if build and not layer.built:
                    layer.build_from_config(build)
        return made

    def _construct(self, arguments: Mapping[str, Any]) -> Any:
        made = {}
        for name, value in arguments.items():
            key = value.get(_HELD) if isinstance(value, dict) else None
            made[name] = (
                self._custom_objects[key]
                if key is not None
                else keras.saving.deserialize_keras_object(value)
            )
        return self._cls(**made)


def _parts(value: Any) -> Iterator[Any]:
    """Yield an object's custom layers, schedules, initializers, constraints and the like."""
    visited = set()
    for owner in _parts_of_object(value):
        for part in (owner, *getattr(owner, "__dict__", {}).values()):
            kind = type(part)
            if isinstance(owner, keras.Layer) and isinstance(part, _COMPILED_WITH):
                continue
            if id(part) not in visited and not is_keras(kind) and _is_configurable(kind):
                visited.add(id(part))
                yield part


def _is_pickled(part: Any) -> bool:
    """Return whether an object without a config and without variables is pickled."""
    kind = type(part)
    return not isinstance(part, _WITH_VARIABLES) and is_keras(kind.get_config)


def _arguments(part: Any) -> dict[str, Any] | None:
    """Return constructor arguments; None if the class has a config or does not store them."""
    kind = type(part)
    if not is_keras(kind.get_config) or not is_keras(kind.from_config):
        return None
    if is_keras(kind.__init__) or kind.__init__ is object.__init__:
        return None
    automatic = _automatic(part)
    arguments: dict[str, Any] = {}
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            return None
        if parameter.kind is parameter.VAR_KEYWORD:
            if isinstance(part, keras.Layer):
                arguments.setdefault("name", part.name)
        elif name == "name":
            arguments[name] = part.name
        elif name in automatic:
            arguments[name] = _deserialized(automatic[name])
        elif name == "dtype" and isinstance(part, keras.Layer):
            arguments[name] = part.dtype_policy
        elif name in vars(part):
            arguments[name] = vars(part)[name]
        elif f"_{name}" in vars(part):
            arguments[name] = vars(part)[f"_{name}"]
        elif parameter.default is parameter.empty:
            return None
    if any(isinstance(entry, keras.KerasTensor) for entry in keras.tree.flatten(arguments)):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name, value in automatic.items():
            arguments.setdefault(name, _deserialized(value))
    return arguments


def _deserialized(value: Any) -> Any:
    return value if _is_made_of_config(value) else keras.saving.deserialize_keras_object(value)


def _automatic(part: Any) -> Mapping[str, Any]:
    """Return the constructor arguments that Keras knows.

    The result has simple values of layers, or the config of a metric's or optimizer's base class.
    The result is empty for models, because Keras records only the defaults.
    """
    if isinstance(part, keras.Model):
        return {}
    if isinstance(part, (keras.metrics.Metric, keras.optimizers.Optimizer)):
        config: dict[str, Any] = type(part).get_config(part)
        rate = getattr(part, "_learning_rate", None)
        is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        return {**config, "learning_rate": rate} if is_schedule else config
    return getattr(getattr(part, "_auto_config", None), "config", None) or {}


def _with_extras(arguments: Mapping[str, Any], extras: dict[str, Any]) -> dict[str, Any]:
    """Replace arguments without Keras objects by references."""
    written = {}
    for name, value in arguments.items():
        if any(_is_made_of_config(entry) for entry in keras.tree.flatten(value)):
            written[name] = value
        else:
            written[name] = {_HELD: _add_extra(value, extras)}
    return written


def _is_made_of_config(value: Any) -> bool:
    """Return whether a value is an object, not a class, for which Keras writes a config."""
    return not isinstance(value, type) and _is_configurable(type(value))


def _accepted(cls: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without Keras's own entries that the constructor does not accept."""
    if not is_keras(cls.from_config) or is_keras(cls.__init__):
        return config
    parameters = inspect.signature(cls.__init__).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return config
    names = {parameter.name for parameter in parameters}
    return {k: v for k, v in config.items() if k in names or k not in _BASE_KEYS}


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
        Name, and registered name, to class or function. Contains those that the values hold,
        those registered with ``keras.saving`` that their configs name, and those given.
    """
    registered = keras.saving.get_custom_objects()
    objects: dict[str, Any] = {}
    for value in values:
        objects.update({name: registered[name] for name in _strings(value) if name in registered})
        for part in _parts_of_object(value):
            candidates = [type(part), *_attribute_classes(part)]
            for candidate in candidates:
                if _is_custom(candidate):
                    objects[candidate.__name__] = candidate
                    objects[keras.saving.get_registered_name(candidate)] = candidate
    return {name: e for name, e in objects.items() if not _is_found(e)} | dict(given or {})


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


def _parts_of_object(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.Model):
        yield from all_layers(value)
    elif isinstance(value, keras.optimizers.Optimizer):
        yield value
        yield value._learning_rate
        for inner in inner_optimizers(value):
            if inner is not value:
                yield from _parts_of_object(inner)
    else:
        yield value


def _attribute_classes(part: Any) -> list[Any]:
    """Return a layer's attributes: functions, and the classes of initializers, regularizers etc."""
    return [
        entry if isinstance(entry, types.FunctionType) else type(entry)
        for name, entry in getattr(part, "__dict__", {}).items()
        # Keras stores wrappers of a layer's own methods there.
        if not hasattr(type(part), name)
    ]


def _is_custom(candidate: Any) -> bool:
    if isinstance(candidate, types.FunctionType):
        return not _is_found(candidate) and candidate.__name__ != "<lambda>"
    return not is_keras(candidate) and _is_configurable(candidate)


def _is_found(entry: Any) -> bool:
    """Return whether Keras finds an entry by name: its own, except functions of ``keras.ops``."""
    is_function = isinstance(entry, types.FunctionType)
    return is_keras(entry) and not (is_function and entry.__module__.startswith("keras.src.ops."))
