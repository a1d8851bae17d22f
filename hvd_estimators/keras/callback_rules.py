"""Which of the user's callbacks run on which rank, and which cannot run on several."""

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

    Those that write files, and those of the user's that have a true attribute ``rank_zero_only``,
    run on rank 0 alone. TensorBoard's write where the run keeps its logs, and so do a CSVLogger
    and a ModelCheckpoint with a relative path, whose files nobody would find in a rank's working
    directory.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        What the user gave.
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
    """Return whether a callback is one of Keras's that write files, or to a server."""
    return isinstance(callback, _WRITING)


def _kept(path: str, logs_path: str | None) -> str:
    """Return a relative path below the run's logs; others, and URLs, stay as they are."""
    if logs_path is None or os.path.isabs(path) or "://" in path:
        return path
    kept = os.path.join(logs_path, path)
    os.makedirs(os.path.dirname(kept), exist_ok=True)
    return kept


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Make sure that callbacks can run on several ranks. Runs on the driver.

    Raises
    ------
    ParamError
        If one is no Keras callback, or keeps and restores models by itself.
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
    """Return whether Keras has to find out if less or more of what is monitored is better."""
    return (
        getattr(callback, "mode", None) == "auto"
        and getattr(callback, "monitor_op", True) is None
        and getattr(callback, "monitor", "loss") not in ("loss", "val_loss")
    )


def check_monitors(param: str, callbacks: Sequence[Any], model: keras.Model) -> None:
    """Check that Keras can judge what callbacks with ``mode="auto"`` monitor. Runs on the driver.

    Keras itself raises on the ranks, after the first epoch.

    Parameters
    ----------
    param : str
        The param, for the message.
    callbacks : sequence of keras.callbacks.Callback
        Its value.
    model : keras.Model
        Compiled, with metrics that are built.

    Raises
    ------
    ParamError
        If Keras cannot tell whether less or more is better.
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
