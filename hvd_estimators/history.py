"""Training histories, in the formats that ``getHistory()`` returns.

Keras models use the format of Keras's ``History.history``. torch and Lightning models use a list
with one dict per epoch. `history_rows` reads both formats. Runs on the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_estimators.training.spec import EpochMetrics, HistoryRow

_VALIDATION = "val_"
"""Prefix of Keras's validation metrics."""


def as_records(epochs: Sequence[EpochMetrics]) -> list[dict[str, Any]]:
    """Return one dict per epoch, the format of torch and Lightning models."""
    return [epoch.as_dict() for epoch in epochs]


def as_keras_history(epochs: Sequence[EpochMetrics]) -> dict[str, list[Any]]:
    """Return one list of values per metric, the format of Keras's ``History.history``."""
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
    """Return one row per value of a history, for any framework.

    Parameters
    ----------
    history : mapping or sequence of mapping
        The return value of ``getHistory()``.

    Returns
    -------
    list of HistoryRow
        Rows ordered by epoch; within an epoch, training comes before validation.
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
    """Convert a Keras history to one dict per epoch."""
    length = max(map(len, history.values()), default=0)
    epochs: list[dict[str, Any]] = [
        {"epoch": n, "train": {}, "validation": {}} for n in range(length)
    ]
    for name, values in history.items():
        stage = "validation" if name.startswith(_VALIDATION) else "train"
        for epoch, value in zip(epochs, values, strict=False):
            epoch[stage][name.removeprefix(_VALIDATION)] = value
    return epochs
