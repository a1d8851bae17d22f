"""Loggers of experiment trackers for TorchEstimator and KerasEstimator (``loggers=[...]``).

The driver calls them. Ranks and executors need no client package and no key.
"""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError

__all__ = ["CometLogger", "LoggedRun", "Logger", "WandbLogger"]


@dataclass(frozen=True)
class LoggedRun:
    """Run that a logger is started for.

    Attributes
    ----------
    run_id : str
        Name of the run: the param ``run_id``, or a generated name. A restarted or resumed run has
        the name of its first part.
    key : str
        40 hexadecimal digits that identify the run among the runs of all stores. A restarted or
        resumed run has the same key.
    epoch : int
        First epoch to log, from 0. A resumed run repeats no epoch of an earlier checkpoint.
    hyperparameters : mapping
        The numbers, strings and booleans among the params that were set, by name.
    """

    run_id: str
    key: str
    epoch: int
    hyperparameters: Mapping[str, bool | int | float | str]


class Logger(abc.ABC):
    """Base class of loggers.

    Each fit calls a copy of the object (`copy.copy`), so open files and connections in `start`. The
    driver calls the methods in a thread for each logger. A slow service therefore delays no rank.
    If `start` raises or takes more than two minutes, a new run fails before it trains. A run that
    resumes shows a warning instead and continues. Failures of the other methods are also warnings.
    """

    def start(self, run: LoggedRun) -> None:  # noqa: B027
        """Open or continue the run. Called once, before training.

        Parameters
        ----------
        run : LoggedRun
            Name, key and hyperparameters of the run.
        """

    @abc.abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Log the values of an epoch. Called once for each epoch of a fit.

        A run that is resumed repeats the epochs after its newest checkpoint, and logs them again.
        At the end of a fit, an epoch that raised is logged once more. If the ranks cannot reach the
        driver, all epochs are logged then, without the rates.

        Parameters
        ----------
        metrics : mapping
            Losses and metrics by name, with the prefix ``val_`` for validation; ``learning_rate``
            and ``rows_per_second``.
        epoch : int
            The epoch, from 0.
        """

    def finish(self, status: str) -> None:  # noqa: B027
        """Close the run. Called once, unless the driver is killed.

        Parameters
        ----------
        status : {"finished", "interrupted", "failed"}
            The end of the fit: with a model, by a request to stop, or by an error.
        """


class WandbLogger(Logger):
    """Logger to Weights & Biases. The driver needs the package ``wandb``.

    The W&B run has the run's name, and a resumed run continues the same W&B run. Charts use the
    epoch as their step. Set the driver's environment variable ``WANDB_API_KEY``, or run
    ``wandb login`` there.

    Parameters
    ----------
    project : str, optional
        The project. Default: ``WANDB_PROJECT``, or else W&B's default.
    **kwargs
        Further arguments of ``wandb.init``; they replace this class's own.
    """

    def __init__(self, project: str | None = None, **kwargs: Any) -> None:
        self._init = {"project": project, **kwargs}
        self._run: Any = None

    def start(self, run: LoggedRun) -> None:
        """Call ``wandb.init`` with the run's name, key and hyperparameters."""
        wandb = import_client("wandb", type(self).__name__)
        arguments = {
            "id": f"{run.run_id}-{run.key[:8]}",
            "name": run.run_id,
            "resume": "allow",
            # A resumed run may train with other values, such as more epochs.
            "allow_val_change": True,
            **self._init,
            "config": {**run.hyperparameters, **self._init.get("config", {})},
        }
        self._run = wandb.init(**arguments)
        # W&B's own steps only increase, and a resumed run may log an epoch again.
        self._run.define_metric("*", step_metric="epoch")

    def log_metrics(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Call ``Run.log`` with the metrics and the epoch."""
        self._run.log({"epoch": epoch, **metrics})

    def finish(self, status: str) -> None:
        """Call ``Run.finish``."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


class CometLogger(Logger):
    """Logger to Comet. The driver needs the package ``comet_ml``.

    A resumed run continues the same experiment. Set the driver's environment variable
    ``COMET_API_KEY``.

    Parameters
    ----------
    project_name : str, optional
        The project. Default: Comet's.
    **kwargs
        Further arguments of ``comet_ml.start``; they replace this class's own.
    """

    def __init__(self, project_name: str | None = None, **kwargs: Any) -> None:
        self._start = {"project_name": project_name, **kwargs}
        self._experiment: Any = None

    def start(self, run: LoggedRun) -> None:
        """Call ``comet_ml.start`` with the run's key, and log name and hyperparameters."""
        comet_ml = import_client("comet_ml", type(self).__name__)
        arguments = {"experiment_key": run.key, "mode": "get_or_create", **self._start}
        self._experiment = comet_ml.start(**arguments)
        self._experiment.set_name(run.run_id)
        self._experiment.log_parameters(dict(run.hyperparameters))

    def log_metrics(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Call ``log_metrics`` of the experiment."""
        self._experiment.log_metrics(dict(metrics), step=epoch, epoch=epoch)

    def finish(self, status: str) -> None:
        """Log the status, and call ``end`` of the experiment."""
        self._experiment.log_other("status", status)
        self._experiment.end()


def import_client(package: str, logger: str) -> Any:
    """Import the client package of a logger.

    Raises
    ------
    DependencyError
        If the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DependencyError(
            f"loggers: {logger} needs the package {package}, which {sys.executable} cannot import. "
            f"Install it on the driver: {INSTALL[package]}"
        ) from error
