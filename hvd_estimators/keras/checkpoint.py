"""A run's checkpoint: a ``.keras`` file that also holds how far the run has come."""

from __future__ import annotations

import pickle
import types
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.keras.files import load_weights, write_archive
from hvd_estimators.spec import EpochMetrics

__all__ = ["RunState", "callback_state", "read_checkpoint", "restore_callback", "write_checkpoint"]

_MEMBER = "hvd_estimators.pkl"


@dataclass(frozen=True)
class RunState:
    """What a run is resumed with, beside model and optimizer.

    Attributes
    ----------
    history : tuple of EpochMetrics
        The epochs that are done.
    callbacks : tuple of mapping
        Attributes of each of the user's callbacks.
    """

    history: tuple[EpochMetrics, ...]
    callbacks: tuple[Mapping[str, Any], ...]


def write_checkpoint(model: keras.Model, state: RunState, file: str | IO[bytes]) -> None:
    """Write a checkpoint; to Keras it is a ``.keras`` file like any other.

    Of a model without a config it is an archive with ``model.weights.h5``.
    """
    with zipfile.ZipFile(file, "w") as archive:
        write_archive(model, archive)
        archive.writestr(_MEMBER, pickle.dumps(state))


def read_checkpoint(model: keras.Model, path: str) -> RunState:
    """Load weights and optimizer state into a built model; return the rest."""
    load_weights(model, path)
    with zipfile.ZipFile(path) as archive:
        resumed: RunState = pickle.loads(archive.read(_MEMBER))
    return resumed


def callback_state(callback: Any) -> dict[str, Any]:
    """Return the attributes of a callback that are plain values: counters, bests, best weights."""
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in ("_model", "params") and _is_plain(value)
    }


def restore_callback(callback: Any, state: Mapping[str, Any]) -> None:
    """Give a callback back what `callback_state` returned, paths of another machine left out."""
    given = vars(callback)
    given.update({name: value for name, value in state.items() if not isinstance(value, str)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, types.FunctionType):
        # How values are compared, which Keras decides on once.
        return value.__module__.startswith("keras.")
    return value is None or isinstance(
        value, (bool, int, float, str, bytes, np.ndarray, np.generic)
    )
