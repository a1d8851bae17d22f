"""Rules for the user's callbacks: the ranks they run on, and checks on the driver."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import keras

from hvd_estimators.exceptions import ParamError

__all__ = ["check_callbacks", "check_monitors", "for_rank", "judges_by_name", "writes_files"]

_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


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
                callback.filename = _kept(callback.filename, logs_path)
            if isinstance(callback, keras.callbacks.ModelCheckpoint):
                callback.filepath = _kept(callback.filepath, logs_path)
        chosen.append(callback)
    return chosen


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback is one of Keras's that write to files or to a server."""
    return isinstance(callback, _WRITING)


def _kept(path: str, logs_path: str | None) -> str:
    """Move a relative path below the run's logs; leave absolute paths and URLs unchanged."""
    if logs_path is None or os.path.isabs(path) or "://" in path:
        return path
    kept = os.path.join(logs_path, path)
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    return kept


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check that callbacks can run on several ranks. Runs on the driver.

    Raises
    ------
    ParamError
        If a callback is not a Keras callback, or backs up and restores models by itself.
    """
    if isinstance(callbacks, keras.callbacks.Callback):
        raise ParamError(f"callbacks: expected a list of callbacks, found {callbacks!r}.")
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CallbackList):
            raise ParamError(
                "callbacks: a CallbackList holds callbacks that run on different ranks. Give them "
                "as a plain list."
            )
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParamError(f"callbacks: expected keras.callbacks.Callback, found {callback!r}.")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ParamError(
                "callbacks: BackupAndRestore would restore one rank and not the others. Leave it "
                "out: the store keeps a checkpoint of every epoch, and a fit with the same run_id "
                "goes on from there."
            )


def judges_by_name(callback: Any) -> bool:
    """Return whether Keras must infer the better direction of the monitored value."""
    return (
        getattr(callback, "mode", None) == "auto"
        and getattr(callback, "monitor_op", True) is None
        and getattr(callback, "monitor", "loss") not in ("loss", "val_loss")
    )


def check_monitors(param: str, callbacks: Sequence[Any], model: keras.Model) -> None:
    """Check that Keras can judge the values that callbacks with ``mode="auto"`` monitor.

    Runs on the driver. Keras itself raises on the ranks, after the first epoch.

    Parameters
    ----------
    param : str
        Name of the param, for the message.
    callbacks : sequence of keras.callbacks.Callback
        Value of the param.
    model : keras.Model
        The compiled model, with built metrics.

    Raises
    ------
    ParamError
        If Keras cannot infer whether lower or higher values are better.
    """
    for callback in filter(judges_by_name, callbacks):
        judge = copy.copy(callback)
        judge.set_model(model)
        try:
            judge._set_monitor_op()
        except ValueError as error:
            name = f"{type(callback).__name__}(monitor={callback.monitor!r})"
            raise ParamError(
                f"{param}: {name} has mode='auto', and Keras cannot tell whether less or more of "
                f"{callback.monitor!r} is better. Set mode='min' or mode='max' in {name}."
            ) from error
