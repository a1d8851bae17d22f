"""Metrics of an epoch as named numbers, and selection of the best epoch by one of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.training.spec import EpochMetrics

_VALIDATION = "val_"
_CAPITALIZED = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z]*\d*")

_LESS = ("loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "crossentropy")
_MORE = (
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "f1", "fbeta", "fmeasure", "iou"),
    *("r2", "similarity", "dice"),
)


def measured(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch by name; names of validation metrics begin with ``val_``."""
    return {
        name if stage == "train" else f"{_VALIDATION}{name.removeprefix(_VALIDATION)}": value
        for _, stage, name, value in record.rows()
    }


def shown_values(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch that are displayed during training, without array elements."""
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
    """Return the metric that selects the best epoch; None if the requested metric does not exist.

    Parameters
    ----------
    monitor : str or None
        The metric. The ``val_`` of a validation metric can be omitted if training has no metric of
        the same name. None means ``val_loss``, or ``loss`` if there is no ``val_loss``.
    names : collection of str
        The available metrics.
    """
    candidates = ("val_loss", "loss") if monitor is None else (monitor, f"{_VALIDATION}{monitor}")
    return next((name for name in candidates if name in names), None)


def check_monitor(
    monitor: str | None, names: Collection[str], param: str = "checkpoint_monitor"
) -> None:
    """Check that the requested metric exists; ``param`` is for the message.

    Raises
    ------
    ParamError
        If the metric does not exist.
    """
    if monitor is not None and monitored(monitor, names) is None:
        raise ParamError(
            f"{param}: found {monitor!r}, which is not measured. Set one of "
            f"{', '.join(map(repr, sorted(names)))}, or none.{did_you_mean(monitor, names)}"
        )


def mode_of(monitor: str, mode: str, param: str = "checkpoint_mode") -> str:
    """Return ``"min"`` if lower values of a metric are better, and ``"max"`` if higher values are.

    Parameters
    ----------
    monitor : str
        The metric.
    mode : {"auto", "min", "max"}
        ``"auto"`` infers the direction from the metric's name, like Keras's ``ModelCheckpoint``.
    param : str
        Name of the param that sets ``mode``, for the message.

    Raises
    ------
    ParamError
        If the name does not determine the direction.
    """
    if mode != "auto":
        return mode
    # Matches words in names such as val_accuracy, and in class names such as MulticlassF1Score.
    words = re.split(r"[^a-z0-9]+", monitor.lower())
    words += [word.lower() for word in _CAPITALIZED.findall(monitor)]
    less = any(word in _LESS or word.endswith("loss") for word in words)
    more = any(word in _MORE for word in words)
    if less == more:
        raise ParamError(
            f"{param}: the name {monitor!r} does not show if lower or higher values are better. "
            f"Set {param} to 'min' or 'max'."
        )
    return "min" if less else "max"
