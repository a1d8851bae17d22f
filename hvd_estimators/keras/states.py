"""Pickle Keras objects by their attributes if their configs are incomplete.

Keras recreates an object from its config. A class without its own ``get_config()`` then gets its
default arguments. This module pickles the attributes instead, as for any Python object. Used on the
driver and on workers.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

__all__ = [
    "StatePickler",
    "base_names",
    "dump_state",
    "is_configurable",
    "is_keras",
    "same_optimizer",
    "same_value",
    "without_variables",
]

_OWN_TYPES = (keras.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)
# Attributes that ``__new__`` sets again, and functions that TensorFlow has compiled.
_MADE_ANEW = ("build", "quantize")
_COMPILED = ("train_function", "test_function", "predict_function", "_eval_epoch_iterator")
# TensorFlow's records of a model's attributes, including compiled functions: a list of pairs with
# names, and a mapping by name.
_NOTED_PAIRS = "_self_unconditional_checkpoint_dependencies"
_NOTED_NAMES = "_self_unconditional_dependency_names"
_STACK_BYTES = 512 * 2**20


class StatePickler(cloudpickle.Pickler):
    """Pickler that stores Keras objects by their attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the pickle reduction of an object; called by pickle."""
        if isinstance(obj, tf.distribute.Strategy):
            return tf.distribute.get_strategy, ()
        if isinstance(obj, tf.Variable):
            name = obj.name.split(":")[0]
            return _make_variable, (obj.numpy(), obj.trainable, name)
        if _has_assets(obj):
            return _load_layer, (type(obj), obj.get_config(), _assets(obj))
        if isinstance(obj, _OWN_TYPES):
            return _new, (type(obj),), _attributes(obj), None, None, _set_attributes
        if _is_tracking(obj, "Tracker"):
            return _new, (type(obj),), dict(vars(obj)), None, None, _set_tracker
        if _is_tracking(obj, "TrackedList", "TrackedSet"):
            return _new, (type(obj),), (obj.tracker, list(obj)), None, None, _fill
        if _is_tracking(obj, "TrackedDict", "TrackedOrderedDict"):
            return _new, (type(obj),), (obj.tracker, dict(obj)), None, None, _fill
        return super().reducer_override(obj)


def dump_state(value: Any) -> bytes:
    """Serialize a value to bytes that `pickle.loads` can read."""
    return _with_deep_stack(lambda: _dump(value))


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    StatePickler(buffer).dump(value)
    return buffer.getvalue()


def _with_deep_stack(function: Callable[[], bytes]) -> bytes:
    """Call a function with a high recursion limit, since a model's layers refer to each other."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = function()
        except BaseException as error:
            outcome["error"] = error

    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(max(limit, 200_000))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
    if "error" in outcome:
        raise outcome["error"]
    value: bytes = outcome["value"]
    return value


def same_optimizer(original: keras.optimizers.Optimizer, copy: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimizer made from a config has the settings of the original."""
    if type(original).__qualname__ != type(copy).__qualname__:
        return False
    names = {"_learning_rate"}
    if not is_keras(type(original)):
        # Slots are created again and then filled.
        names |= {name for name, value in vars(original).items() if not _holds_variables(value)}
        names -= set(vars(keras.optimizers.SGD())) - {"_learning_rate"}
    ours, theirs = vars(original), vars(copy)
    return all(name not in ours or same_value(ours[name], theirs.get(name)) for name in names)


def _holds_variables(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_variables, value))
    return isinstance(value, keras.Variable)


def without_variables(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Remove an optimizer's state for another model's variables; return the optimizer."""
    if optimizer.built:
        kept = (optimizer.iterations, getattr(optimizer, "_learning_rate", None))
        for variable in list(optimizer._variables):
            if not any(variable is entry for entry in kept):
                optimizer._tracker.untrack(variable)
        optimizer._trainable_variables = []
        optimizer._trainable_variables_indices = {}
        optimizer.built = False
    return optimizer


def is_keras(entry: Any) -> bool:
    """Return whether a class or function is one of Keras's own."""
    return str(getattr(entry, "__module__", "")).partition(".")[0] == "keras"


def is_configurable(entry: Any) -> bool:
    """Return whether an entry is a class that configs can name, such as a layer or loss."""
    return isinstance(entry, type) and all(
        callable(getattr(entry, name, None)) for name in ("get_config", "from_config")
    )


def base_names() -> set[str]:
    """Return the names of attributes that Keras itself sets on layers and models."""
    if not _names:
        inputs = keras.Input((1,))
        functional = keras.Model(inputs, inputs)
        plain = keras.Model()
        for model in (functional, plain):
            model.compile("sgd", "mse", metrics=["mae"])
        for entry in (functional, plain, keras.Sequential(), keras.Layer()):
            _names.update(vars(entry))
        _names.update((*_COMPILED, "history", "_build_shapes_dict"))
    return _names


_names: set[str] = set()


def same_value(ours: Any, theirs: Any, depth: int = 0) -> bool:
    """Return whether two attributes are equal; weights and layers are not compared."""
    if ours is theirs or depth > 6:
        return True
    if isinstance(ours, (tf.Variable, keras.Variable, keras.Layer)):
        # Weights are sent separately, and layers are compared one by one.
        return theirs is not None
    if isinstance(ours, (list, tuple)):
        return (
            isinstance(theirs, (list, tuple))
            and len(ours) == len(theirs)
            and all(same_value(a, b, depth + 1) for a, b in zip(ours, theirs, strict=True))
        )
    if isinstance(ours, Mapping):
        return (
            isinstance(theirs, Mapping)
            and ours.keys() == theirs.keys()
            and all(same_value(value, theirs[key], depth + 1) for key, value in ours.items())
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
    known = set(vars(keras.metrics.Metric())) if isinstance(ours, keras.metrics.Metric) else set()
    return all(
        name in known or (name in vars(theirs) and same_value(value, vars(theirs)[name], depth + 1))
        for name, value in vars(ours).items()
    )


def _attributes(obj: Any) -> dict[str, Any]:
    state = {name: value for name, value in vars(obj).items() if name not in _MADE_ANEW}
    for name in _COMPILED:
        if name in state:
            state[name] = None
    if _NOTED_PAIRS in state:
        state[_NOTED_PAIRS] = [pair for pair in state[_NOTED_PAIRS] if pair.name not in _COMPILED]
    if _NOTED_NAMES in state:
        noted = state[_NOTED_NAMES].items()
        state[_NOTED_NAMES] = {name: entry for name, entry in noted if name not in _COMPILED}
    nodes = state.get("_nodes")
    if isinstance(obj, keras.Model) and isinstance(nodes, set):
        # Keras names the nodes of a graph by the memory addresses of its operations.
        operations = {str(id(operation)): operation for operation in state["_operations"]}
        parts = [key.split("_", 1) for key in sorted(nodes)]
        state["_nodes"] = [(operations[place], rest) for place, rest in parts]
    return state


def _set_attributes(obj: Any, state: dict[str, Any]) -> None:
    nodes = state.get("_nodes")
    if isinstance(obj, keras.Model) and isinstance(nodes, list):
        state["_nodes"] = {f"{id(operation)}_{rest}" for operation, rest in nodes}
    vars(obj).update(state)
    if isinstance(obj, keras.optimizers.Optimizer) and state.get("_trainable_variables_indices"):
        indices = {obj._var_key(v): i for i, v in enumerate(obj._trainable_variables)}
        vars(obj)["_trainable_variables_indices"] = indices


def _is_tracking(obj: Any, *names: str) -> bool:
    kind = type(obj)
    return kind.__name__ in names and kind.__module__.endswith("utils.tracking") and is_keras(kind)


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


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _make_variable(value: Any, trainable: bool, name: str) -> tf.Variable:
    return tf.Variable(value, trainable=trainable, name=name)


def _has_assets(obj: Any) -> bool:
    """Return whether a Keras layer keeps TensorFlow lookup tables beside its weights."""
    return (
        isinstance(obj, keras.Layer)
        and is_keras(type(obj))
        and not isinstance(obj, keras.Model)
        and hasattr(type(obj), "load_assets")
    )


def _assets(layer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        layer.save_assets(directory)
        found = {}
        for name in os.listdir(directory):
            with open(os.path.join(directory, name), "rb") as file:
                found[name] = file.read()
        return found


def _load_layer(cls: Any, config: dict[str, Any], assets: Mapping[str, bytes]) -> Any:
    layer = cls.from_config(config)
    with tempfile.TemporaryDirectory() as directory:
        for name, content in assets.items():
            with open(os.path.join(directory, name), "wb") as file:
                file.write(content)
        if assets:
            layer.load_assets(directory)
    return layer
