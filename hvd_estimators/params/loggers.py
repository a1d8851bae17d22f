"""Param for the loggers of a fit. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable

from hvd_estimators.exceptions import ParamError
from hvd_estimators.loggers import Logger
from hvd_estimators.params import DeclaredParams, objects, param


def _loggers(name: str, value: Iterable[Logger]) -> list[Logger]:
    """Accept a list of loggers."""
    loggers = objects(name, value)
    for entry in loggers:
        if not isinstance(entry, Logger):
            hint = (
                f" Set an object of the class: {entry.__name__}(...)."
                if isinstance(entry, type)
                else " Set WandbLogger(...), CometLogger(...), or your own subclass of Logger."
            )
            raise ParamError(
                f"{name}: expected objects of subclasses of hvd_estimators.loggers.Logger, found "
                f"{entry!r}.{hint}"
            )
    return loggers


class LoggerParams(DeclaredParams):
    """Param for loggers of experiment trackers."""

    loggers = param(
        "Loggers of experiment trackers, such as hvd_estimators.loggers.WandbLogger, CometLogger "
        "and your own subclasses of Logger. Rank 0 logs losses, metrics, learning rate and rows "
        "per second of each epoch, and the hyperparameters.",
        default=[],
        convert=_loggers,
    )
