"""What was measured in the epochs of a run, in the forms in which ``getHistory()`` tells it.

Keras's form is that of its own ``History.history``; torch's and Lightning's is a list with a dict
per epoch. `history_rows` reads both. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_estimators.training.spec import EpochMetrics, HistoryRow

__all__ = ["as_keras_history", "as_records", "history_rows"]

_VALIDATION = "val_"
"""Begins the names of what Keras has measured in validation."""


def as_records(epochs: Sequence[EpochMetrics]) -> list[dict[str, Any]]:
    """Return a dict per epoch, as torch's and Lightning's models hold it."""
    return [epoch.as_dict() for epoch in epochs]


def as_keras_history(epochs: Sequence[EpochMetrics]) -> dict[str, list[Any]]:
    """Return name to a list of values by epoch, as Keras's ``History.history``."""
    history: dict[str, list[Any]] = {}
    for epoch in epochs:
        for name, value in epoch.train.items():
            history.setdefault(name, []).append(value)
        for name, value in (epoch.validation or {}).items():
            history.setdefault(f"{_VALIDATION}{name}", []).append(value)
    return history


def history_rows(
    history: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
) -> list[HistoryRow]:
    """Return one row per number of a history of any framework.

    Parameters
    ----------
    history : mapping or sequence of mapping
        What ``getHistory()`` returns.

    Returns
    -------
    list of HistoryRow
        By epoch, and in an epoch training first.
    """
    epochs = _of_keras(history) if isinstance(history, Mapping) else history
    return [
        row
        for epoch in epochs
        for row in EpochMetrics(
            int(epoch["epoch"]), epoch.get("train") or {}, epoch.get("validation")
        ).rows()
    ]


def _of_keras(history: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the same as a dict per epoch."""
    length = max(map(len, history.values()), default=0)
    epochs: list[dict[str, Any]] = [
        {"epoch": n, "train": {}, "validation": {}} for n in range(length)
    ]
    for name, values in history.items():
        stage = "validation" if name.startswith(_VALIDATION) else "train"
        for epoch, value in zip(epochs, values, strict=False):
            epoch[stage][name.removeprefix(_VALIDATION)] = value
    return epochs
