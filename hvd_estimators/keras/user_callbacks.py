"""The user's callbacks: checks on the driver, the ranks that they run on, and their states."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.training.run_state import encode, is_encodable

logger = logging.getLogger(__name__)

_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

_SET_BY_KERAS = tuple(vars(keras.callbacks.Callback()))
"""Attributes of every callback, such as the model."""

_SET_IN_TRAINING = ("append_header", "min_delta")
"""Attributes that Keras's callbacks set from the others in each part of a run."""

_SETTING = (
    *(keras.callbacks.CSVLogger, keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint),
    keras.callbacks.ReduceLROnPlateau,
)
"""The callbacks that do this, and classes derived from them."""


def for_rank(
    callbacks: Sequence[keras.callbacks.Callback],
    rank: int,
    logs_path: str | None,
    *,
    is_resumed: bool = False,
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
    is_resumed : bool
        Whether the run has epochs, whose rows a CSVLogger keeps.
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
                callback.append = callback.append or is_resumed
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
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParamError(f"callbacks: expected keras.callbacks.Callback, found {callback!r}.")
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ParamError(
                "callbacks: BackupAndRestore would restore one rank only. Remove it: the store "
                "has a checkpoint of every epoch, and a fit with the same run_id resumes from it."
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
    """States of a run's callbacks on rank 0, from which all ranks resume.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's callbacks, the same on all ranks.
    restored : sequence of mapping
        The checkpointed return value of `capture`; empty for a new run.
    scalars : ScalarState, optional
        Scalars to restore in a resumed run, because callbacks set them when training begins.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        restored: Sequence[Mapping[str, Any]] = (),
        scalars: ScalarState | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._scalars = scalars
        self._restored = restored
        self._given = list(map(given_arguments, callbacks))

    def capture(self) -> list[dict[str, Any]]:
        """Return the states as a checkpoint stores them."""
        return [
            {"class": type(callback).__qualname__, "state": callback_state(callback, given)}
            for callback, given in zip(self._callbacks, self._given, strict=True)
        ]

    def restore(self) -> None:
        """Restore the callbacks of a resumed run; callbacks of one class in their order."""
        states: defaultdict[str, deque[Mapping[str, Any]]] = defaultdict(deque)
        for entry in self._restored:
            states[entry["class"]].append(entry["state"])
        for callback in self._callbacks:
            if of_class := states[type(callback).__qualname__]:
                restore_callback(callback, of_class.popleft())
        if unused := [name for name, of_class in states.items() if of_class]:
            logger.warning(
                "callbacks: the run's checkpoint has states of %s, which the fit no longer has.",
                ", ".join(unused),
            )
        if self._scalars is not None:
            self._scalars.restore()


def given_arguments(callback: Any) -> dict[str, Any]:
    """Return a callback's attributes that are named as arguments of its class, encoded."""
    constructors = [vars(cls).get("__init__") for cls in type(callback).__mro__]
    functions = filter(inspect.isfunction, constructors)
    names = {name for made in functions for name in inspect.signature(made).parameters}
    attributes = vars(callback).items()
    return {n: _encoded(value) for n, value in attributes if n in names and is_encodable(value)}


def _encoded(value: Any) -> tuple[Any, list[bytes]]:
    """Return a document that is equal for equal values, also for arrays and NaN."""
    arrays: list[Any] = []
    return repr(encode(value, arrays)), [array.tobytes() for array in arrays]


def callback_state(callback: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a callback's attributes that are plain values: counters, best values, best weights.

    Attributes that are as the user gave them are left out: another fit may give others.

    Parameters
    ----------
    callback : keras.callbacks.Callback
        The callback.
    given : mapping
        Return value of `given_arguments` before training.
    """
    left_out = _SET_BY_KERAS
    if isinstance(callback, _SETTING):
        left_out = (*left_out, *_SET_IN_TRAINING)
    # Other kinds of dicts would come back as plain ones.
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in left_out
        and is_encodable(value)
        and (type(value) is dict or not isinstance(value, Mapping))
        and not (name in given and given[name] == _encoded(value))
    }


def restore_callback(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore a callback from `callback_state`, except strings: paths of another machine."""
    for name, value in state.items():
        if not isinstance(value, str):
            # A copy, because a state can be restored more than once.
            vars(callback)[name] = copy.deepcopy(value)
