"""The user's callbacks: checks on the driver, the ranks that they run on, and their states."""

from __future__ import annotations

import importlib
import os
import pickle
import types
from collections.abc import Collection, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.training.run_state import is_encodable

_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

_OWN_BYTES = 2**16
"""Larger values of a callback (such as best weights) are assumed to be equal on all ranks."""

_SET_BY_KERAS = tuple(vars(keras.callbacks.Callback()))
"""Attributes of every callback, such as the model."""

_OF_FILES = ("append_header",)
"""Attributes that a callback derives from its file when training begins."""


def for_rank(
    callbacks: Sequence[keras.callbacks.Callback], rank: int, logs_path: str | None
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that run on a rank.

    Callbacks that write files run on rank 0 only, and so do the user's callbacks with a true
    attribute ``rank_zero_only``. TensorBoard writes to the run's log directory. A CSVLogger or
    ModelCheckpoint with a relative path also writes there, because its files would be hard to find
    in a rank's working directory.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's callbacks.
    rank : int
        The rank.
    logs_path : str or None
        Local directory of the run's logs.
    """
    chosen = []
    for callback in callbacks:
        if writes_files(callback) or getattr(callback, "rank_zero_only", False):
            if rank != 0:
                continue
            if isinstance(callback, keras.callbacks.TensorBoard) and logs_path is not None:
                callback.log_dir = logs_path
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.filename = _below_logs(callback.filename, logs_path)
            if isinstance(callback, keras.callbacks.ModelCheckpoint):
                callback.filepath = _below_logs(callback.filepath, logs_path)
        chosen.append(callback)
    return chosen


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback is one of Keras's that write to files or to a server."""
    return isinstance(callback, _WRITING)


def _below_logs(path: str, logs_path: str | None) -> str:
    """Move a relative path below the run's logs; leave absolute paths and URLs unchanged."""
    if logs_path is None or os.path.isabs(path) or "://" in path:
        return path
    path = os.path.join(logs_path, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check that callbacks can run on several ranks. Runs on the driver.

    Raises
    ------
    ParamError
        If a callback is not a Keras callback, or backs up and restores models by itself.
    """
    for callback in callbacks:
        reject_callback_list("callbacks", callback)
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParamError(f"callbacks: expected keras.callbacks.Callback, found {callback!r}.")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ParamError(
                "callbacks: BackupAndRestore would restore one rank only. Remove it: the store "
                "has a checkpoint of every epoch, and a fit with the same run_id resumes from it."
            )


def reject_callback_list(param: str, value: Any) -> None:
    """Raise a `ParamError` for a CallbackList, whose callbacks may run on different ranks."""
    if isinstance(value, keras.callbacks.CallbackList):
        raise ParamError(
            f"{param}: a CallbackList holds callbacks that run on different ranks. Give them as a "
            "plain list."
        )


def selects_by_metric(callback: Any) -> bool:
    """Return whether a checkpoint callback selects the model by a value of Keras's logs."""
    own = keras.callbacks.ModelCheckpoint.on_epoch_end
    return type(callback).on_epoch_end is own and callback.save_best_only


def check_selection(callback: Any, names: Collection[str]) -> None:
    """Check that the value by which a checkpoint callback selects the model is measured.

    Keras only warns, and the last model would be returned.

    Parameters
    ----------
    callback : keras.callbacks.ModelCheckpoint
        Value of the param ``checkpoint_callback``.
    names : collection of str
        Entries of the logs that are single numbers.

    Raises
    ------
    ParamError
        If the value is not measured.
    """
    monitor = callback.monitor
    if selects_by_metric(callback) and monitor not in names:
        raise ParamError(
            f"checkpoint_callback: {type(callback).__name__}(monitor={monitor!r}) selects the "
            f"model by {monitor!r}, which is not measured as a single number. Set monitor to one "
            f"of {', '.join(map(repr, sorted(names)))}.{did_you_mean(monitor, names)}"
        )


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
                    if name not in of_first or pickle.dumps(value) != pickle.dumps(of_first[name])
                }
                for values, of_first in zip(of_rank, first, strict=True)
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
    left_out = _SET_BY_KERAS
    if isinstance(callback, keras.callbacks.CSVLogger):
        left_out = (*left_out, *_OF_FILES)
    attributes = {name: v for name, v in vars(callback).items() if name not in left_out}
    plain_values = {name: _plain(value) for name, value in attributes.items()}
    functions = {
        name: path
        for name, value in attributes.items()
        if isinstance(value, types.FunctionType)
        and _function(path := f"{value.__module__}:{value.__qualname__}") is value
    }
    values = {name: value for name, value in plain_values.items() if is_encodable(value)}
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


def _function(name: str) -> Any:
    """Return a Keras function by its name; None if Keras has no such function."""
    module, _, path = name.partition(":")
    if not module.startswith("keras."):
        return None
    return getattr(importlib.import_module(module), path, None)
