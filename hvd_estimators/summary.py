"""Results of a fit and of an evaluation, as models return them. Runs on the driver.

`TrainingSummary` and `EvaluationSummary` are the summaries. Histories have two formats, as
``getHistory()`` returns them. Keras models use the format of Keras's ``History.history``. torch and
Lightning models use a list with one dict per epoch. `history_rows` reads both formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.training.spec import EpochMetrics, HistoryRow, measured, mode_of, monitored


@dataclass(frozen=True)
class TrainingSummary:
    """Metrics by epoch, duration, rows and restarts of a fit.

    A resumed run's metrics include the epochs of its earlier fits; duration and restarts describe
    this fit.

    Attributes
    ----------
    run_id : str
        The run.
    metrics : tuple of HistoryRow
        Tuples of epoch (from 0), stage (``"train"`` or ``"validation"``), name and value.
        ``model.history_frame()`` returns them as a DataFrame.
    best_epoch : int or None
        Epoch (from 0) with the best value of ``checkpoint_monitor``, or of the metric that an
        ``EarlyStopping`` or ``ModelCheckpoint`` callback monitors. Default: the validation loss.
        None if the metric was not measured, or if its name does not show whether lower or higher
        values are better.
    rows, validation_rows : int
        Number of training and validation rows.
    num_ranks : int
        Number of ranks at the end.
    seconds : float
        Duration of the training, from the launch of the ranks to their results, in seconds.
        Preparation of data is not included.
    restarts : int
        Number of times that the ranks were launched again.
    stopped : bool
        Whether a callback ended the training.
    """

    run_id: str
    metrics: tuple[HistoryRow, ...] = field(repr=False)
    best_epoch: int | None
    rows: int
    validation_rows: int
    num_ranks: int
    seconds: float
    restarts: int
    stopped: bool

    @property
    def totalIterations(self) -> int:
        """Number of epochs of the run, under the name that Spark ML uses."""
        return len({epoch for epoch, *_ in self.metrics})

    @property
    def objectiveHistory(self) -> list[float]:
        """Training loss of each epoch, under the name that Spark ML uses."""
        return self.values("loss")

    def values(self, name: str, stage: str = "train") -> list[float]:
        """Return a metric's values by epoch.

        Parameters
        ----------
        name : str
            Name of the metric.
        stage : {"train", "validation"}
            Stage that measured it.
        """
        return [value for _, of_stage, of, value in self.metrics if (of_stage, of) == (stage, name)]


@dataclass(frozen=True)
class EvaluationSummary:
    """Loss and metrics of a model on a DataFrame, as ``model.evaluate(df)`` returns them.

    ``summary["name"]`` returns a metric's value.

    Attributes
    ----------
    rows : int
        Number of evaluated rows.
    metrics : dict of str to float
        Values by the names of training, ``"loss"`` first. A metric with several values has a list.
    """

    rows: int
    metrics: Mapping[str, Any]

    @property
    def loss(self) -> float:
        """The loss."""
        return float(self.metrics["loss"])

    def __getitem__(self, name: str) -> Any:
        return self.metrics[name]


_SELECTING = ("EarlyStopping", "ModelCheckpoint")
"""Classes of callbacks that select an epoch, in Keras, Lightning and this package."""


def selecting_metric(
    monitor: str | None, mode: str, callbacks: Sequence[Any] | None
) -> tuple[str | None, str]:
    """Return the metric that selects the best epoch, and its mode, see `find_best_epoch`.

    Parameters
    ----------
    monitor, mode : str or None, str
        The params ``checkpoint_monitor`` and ``checkpoint_mode``.
    callbacks : sequence or None
        The user's callbacks. The first one that selects an epoch counts if ``monitor`` is None.
    """
    for callback in (callbacks or ()) if monitor is None else ():
        found = getattr(callback, "monitor", None)
        if isinstance(found, str) and any(c.__name__ in _SELECTING for c in type(callback).__mro__):
            return found, str(getattr(callback, "mode", mode))
    return monitor, mode


def find_best_epoch(history: Sequence[EpochMetrics], monitor: str | None, mode: str) -> int | None:
    """Return the epoch with the best value of a metric, or None if it cannot be determined.

    Parameters
    ----------
    history : sequence of EpochMetrics
        The epochs.
    monitor : str or None
        The metric, see `monitored`.
    mode : {"auto", "min", "max"}
        Which values are better, see `mode_of`.
    """
    values = {record.epoch: measured(record) for record in history}
    # Epochs may have no validation.
    name = monitored(monitor, {name for of in values.values() for name in of})
    found = {epoch: of[name] for epoch, of in values.items() if name in of} if name else {}
    # NaN is never the best.
    found = {epoch: value for epoch, value in found.items() if value == value}
    if not found or name is None:
        return None
    try:
        sign = 1 if mode_of(name, mode) == "min" else -1
    except ParamError:
        return None
    return min(found, key=lambda epoch: sign * found[epoch])


_VALIDATION = "val_"
"""Prefix of Keras's validation metrics."""


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
