"""Callback states and in-memory model copies, for checkpoints."""

from __future__ import annotations

import importlib
import logging
import pickle
import threading
import types
import zipfile
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.data.arrays import Array
from hvd_estimators.keras.backend import all_layers, inner_optimizers, model_optimizers
from hvd_estimators.keras.model_file import rewritten_variables, write_archive
from hvd_estimators.training.run_state import is_encodable

__all__ = [
    "CallbackStates",
    "ModelCopy",
    "ScalarState",
    "callback_state",
    "restore_callback",
    "save_file",
    "snapshot",
]

logger = logging.getLogger(__name__)


class _Written(threading.local):
    """Values that a thread writes instead of current ones, by id of layer or optimizer."""

    values: Mapping[int, Mapping[str, Array]] = {}


_written = _Written()


def snapshot(model: keras.Model) -> ModelCopy | None:
    """Copy the contents of a model's file into memory; return None if that is impossible.

    A copy is impossible if a layer saves additional files or requires Keras's own kind of store.
    """
    for layer in all_layers(model):
        save_assets = getattr(layer, "save_assets", None)
        if save_assets is not None and save_assets.__module__.partition(".")[0] != "keras":
            return None
    try:
        return ModelCopy(model)
    except Exception as error:
        logger.debug("A checkpoint is written while training waits: %s", error)
        return None


class ModelCopy:
    """In-memory copy of all variables that a model's layers and optimizers save.

    The class does not clone the model, because Keras cannot clone every model. Instead the model
    itself is written. In the writing thread, its layers save the copied values instead of the
    current ones.

    Parameters
    ----------
    model : keras.Model
        The model, built and compiled.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._values: dict[int, _Store] = {}
        self._rewritten = rewritten_variables(model)
        optimizers = model_optimizers(model)
        inner = [each for optimizer in optimizers for each in inner_optimizers(optimizer)]
        for saver in [*all_layers(model), *optimizers, *inner]:
            if id(saver) not in self._values:
                store = _Store()
                saver.save_own_variables(store)
                self._values[id(saver)] = store
                _let_save_copies(saver)

    def save(self, file: IO[bytes]) -> None:
        """Write the file that `save_file` would have written at copy time. Runs in any thread."""
        _written.values = self._values
        try:
            save_file(self._model, file, self._rewritten)
        finally:
            _written.values = {}


class _Store(dict[str, Array]):
    """Store that copies each value that a layer saves, in place of one of Keras's stores."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, np.array(keras.ops.convert_to_numpy(value)))


def _let_save_copies(saver: Any) -> None:
    """Make a layer or an optimizer save its copied values in a thread that writes a copy."""
    # Bypasses Keras's attribute tracking, which would inspect the value.
    attributes = vars(saver)
    if "save_own_variables" in attributes:
        return
    save = saver.save_own_variables

    def save_own_variables(store: Any) -> None:
        values = _written.values.get(id(saver))
        if values is None:
            save(store)
        else:
            for name, value in values.items():
                store[name] = value

    attributes["save_own_variables"] = save_own_variables


_OWN_BYTES = 2**16
"""Larger values of a callback (such as best weights) are assumed to be equal on all ranks."""


_NOT_STATE: tuple[str, ...] = ("_model", "params")


_OF_FILES = ("append_header",)
"""Attributes that a callback derives from its file when training begins."""


def save_file(
    model: keras.Model, file: str | IO[bytes], rewritten: Mapping[int, Any] | None = None
) -> None:
    """Write a model as a ``.keras`` file, which `load_weights` reads.

    For a model without a config, the file is an archive with ``model.weights.h5``. For
    ``rewritten`` see `write_archive`.
    """
    with zipfile.ZipFile(file, "w") as archive:
        write_archive(model, archive, rewritten)


class ScalarState:
    """Scalar variables of a model's optimizers: learning rates, step counts, loss scales.

    Some callbacks set these variables when training begins, also in a resumed run.

    Parameters
    ----------
    model : keras.Model
        The model, with built optimizers.
    """

    def __init__(self, model: keras.Model) -> None:
        self._values = [
            (variable, variable.numpy())
            for optimizer in model_optimizers(model)
            for variable in optimizer.variables
            if not len(variable.shape)
        ]

    def restore(self) -> None:
        """Set the variables to the values that they had at construction."""
        for variable, value in self._values:
            variable.assign(value)


class CallbackStates:
    """States of a run's callbacks: rank 0's in full, and the differences on other ranks.

    The states can differ because a callback sees only its rank's batches.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's callbacks, the same on all ranks.
    restored : mapping
        The checkpointed return value of `parts`; empty for a new run.
    rank, size : int
        This rank, and the number of ranks.
    scalars : ScalarState, optional
        Scalars to restore in a resumed run, because callbacks set them when training begins.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        restored: Mapping[str, Any],
        rank: int,
        size: int,
        scalars: ScalarState | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._scalars = scalars
        self._restored = list(restored.get("callbacks", ()))
        of_ranks = restored.get("callbacks_of_ranks", ())
        if len(of_ranks) == size:
            self._restored = [
                {**state, "values": {**state["values"], **own}}
                for state, own in zip(self._restored, of_ranks[rank], strict=True)
            ]

    def own(self) -> list[dict[str, Any]]:
        """Return the state that rank 0 needs from this rank, by callback."""
        return [
            {
                name: value
                for name, value in callback_state(callback)["values"].items()
                if _num_bytes(value) <= _OWN_BYTES
            }
            for callback in self._callbacks
        ]

    def parts(self, of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the states as a checkpoint stores them; ``of_ranks`` holds each rank's `own`."""
        first = of_ranks[0]
        different = [
            [
                {
                    name: value
                    for name, value in values.items()
                    if name not in known or pickle.dumps(value) != pickle.dumps(known[name])
                }
                for values, known in zip(of_rank, first, strict=True)
            ]
            for of_rank in of_ranks
        ]
        states = list(map(callback_state, self._callbacks))
        return {"callbacks": states, "callbacks_of_ranks": different}

    def restore(self) -> None:
        """Restore the callbacks of a resumed run."""
        for callback, state in zip(self._callbacks, self._restored, strict=False):
            restore_callback(callback, state)
        if self._scalars is not None:
            self._scalars.restore()


def callback_state(callback: Any) -> dict[str, dict[str, Any]]:
    """Return a callback's attributes that are plain values: counters, best values, best weights.

    Functions of Keras that compare values are stored by name.
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
    """Restore a callback from `callback_state`, except strings: paths of another machine."""
    attributes = vars(callback)
    for name, value in state["values"].items():
        if not isinstance(value, str):
            # A separate container, because a state can be restored more than once.
            attributes[name] = _like(attributes.get(name), _plain(value))
    for name, function in state["functions"].items():
        attributes[name] = _function(function)


def _num_bytes(value: Any) -> int:
    """Return the approximate size of a plain value in bytes."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


def _plain(value: Any) -> Any:
    """Convert a container of any kind to a list, tuple or dict."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(map(_plain, value))
    return value


def _like(given: Any, value: Any) -> Any:
    """Convert a value to the kind of container that a callback created, such as a deque."""
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
    """Return a Keras function by its name; None if Keras has no such function."""
    module, _, path = name.partition(":")
    if not module.startswith("keras."):
        return None
    return getattr(importlib.import_module(module), path, None)
