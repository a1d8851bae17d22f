"""What was measured in an epoch as numbers with names, and by which of them an epoch is best."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.training.spec import EpochMetrics

__all__ = ["check_monitor", "measured", "mode_of", "monitored", "shown_values"]

_VALIDATION = "val_"
_CAPITALIZED = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z]*\d*")

_LESS = ("loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "crossentropy")
_MORE = (
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "f1", "fbeta", "fmeasure", "iou"),
    *("r2", "similarity", "dice"),
)


def measured(record: EpochMetrics) -> dict[str, float]:
    """Return the numbers of an epoch by name; those of validation begin with ``val_``."""
    return {
        name if stage == "train" else f"{_VALIDATION}{name.removeprefix(_VALIDATION)}": value
        for _, stage, name, value in record.rows()
    }


def shown_values(record: EpochMetrics) -> dict[str, float]:
    """Return the numbers of an epoch that are shown while it trains: no members of arrays."""
    return measured(
        EpochMetrics(record.epoch, _scalars(record.train), _scalars(record.validation or {}))
    )


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        {name: value for name, value in group.items() if isinstance(value, (int, float))}
        for group in values.get("all_metrics", ())
    ]
    return {**values, "all_metrics": groups}


def monitored(monitor: str | None, names: Collection[str]) -> str | None:
    """Return the metric that tells which epoch is best; None if nothing that was asked for does.

    Parameters
    ----------
    monitor : str or None
        The metric; one of validation may be named without ``val_`` where training has none of
        that name. None stands for ``val_loss``, or ``loss`` without it.
    names : collection of str
        What is measured.
    """
    wanted = ("val_loss", "loss") if monitor is None else (monitor, f"{_VALIDATION}{monitor}")
    return next((name for name in wanted if name in names), None)


def check_monitor(monitor: str | None, names: Collection[str]) -> None:
    """Make sure that a metric that was asked for is measured.

    Raises
    ------
    ParamError
        If it is not.
    """
    if monitor is not None and monitored(monitor, names) is None:
        raise ParamError(
            f"checkpoint_monitor: found {monitor!r}, which is not measured. Set one of "
            f"{', '.join(map(repr, sorted(names)))}, or none.{did_you_mean(monitor, names)}"
        )


def mode_of(monitor: str, mode: str) -> str:
    """Return ``"min"`` or ``"max"``: whether less or more of a metric is better.

    Parameters
    ----------
    monitor : str
        The metric.
    mode : {"auto", "min", "max"}
        ``"auto"`` tells by the metric's name, as Keras's ``ModelCheckpoint`` does.

    Raises
    ------
    ParamError
        If the name does not tell.
    """
    if mode != "auto":
        return mode
    # Of names such as val_accuracy, and of classes such as MulticlassF1Score.
    words = re.split(r"[^a-z0-9]+", monitor.lower())
    words += [word.lower() for word in _CAPITALIZED.findall(monitor)]
    less = any(word in _LESS or word.endswith("loss") for word in words)
    more = any(word in _MORE for word in words)
    if less == more:
        raise ParamError(
            f"checkpoint_mode: whether less or more of {monitor!r} is better cannot be told by "
            "its name. Set checkpoint_mode to 'min' or 'max'."
        )
    return "min" if less else "max"
