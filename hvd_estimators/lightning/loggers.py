"""Loggers, profilers and checkpoint files of a run, in the store."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.lightning.package import FLAVORS, CheckpointIO, Flavor, flavor_of, is_lightning
from hvd_estimators.store.base import Store
from hvd_estimators.training.run_state import reading

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


@contextlib.contextmanager
def quiet(verbose: int = 0) -> Iterator[None]:
    """Silence Lightning's advertisements, and below ``verbose=2`` its notes on hardware.

    Both Lightning packages log through the package that is imported last, and an import sets a
    package's log level. Therefore the loggers of both packages get filters.
    """
    packages = [name for flavor in FLAVORS for name in (flavor.name, flavor.fabric)]
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in packages]

    def is_shown(record: logging.LogRecord) -> bool:
        is_tip = str(record.msg).startswith("💡 Tip:")
        return record.levelno >= logging.ERROR or (verbose >= 2 and not is_tip)

    for log in loggers:
        log.addFilter(is_shown)
    try:
        yield
    finally:
        for log in loggers:
            log.removeFilter(is_shown)


class StoreCheckpointIO(CheckpointIO):
    """Checkpoint files in a store, each written atomically.

    Parameters
    ----------
    store : Store
        Opens the files.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loaded: dict[str, dict[str, Any]] = {}

    def add_loaded(self, path: str, checkpoint: dict[str, Any]) -> None:
        """Add a checkpoint that was already loaded, for the next `load_checkpoint` of its path."""
        self._loaded[path] = checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        with self._store.open_atomic(str(path)) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. Runs code from the file, unless ``weights_only``."""
        if path in self._loaded:
            return self._loaded.pop(path)
        with reading(self._store, str(path)) as file:
            checkpoint: dict[str, Any] = torch.load(
                file, map_location=map_location or "cpu", weights_only=bool(weights_only)
            )
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint."""
        self._store.delete(str(path))


def make_loggers(
    logger: Any, path: str | None, rank: int, flavor: Flavor, steps: int | None = None
) -> list[Logger]:
    """Return the loggers of a run, which write to the run's logs.

    Parameters
    ----------
    logger : Logger, sequence of Logger, bool or None
        The user's loggers. None and True select TensorBoard's logger, or CSV files if
        TensorBoard is not installed.
    path : str or None
        A local directory for the logs; if None, only the user's loggers are used.
    rank : int
        This rank; only rank 0 logs.
    flavor : Flavor
        Lightning's package.
    steps : int, optional
        Steps that a resumed run has logged. Later entries of an earlier part of the run are hidden
        by TensorBoard, and deleted from CSV files, because the run repeats their steps.
    """
    if logger is False:
        return []
    # With this module, tensorboard uses its own file functions and does not import TensorFlow.
    marker = "tensorboard.compat.notf"
    sys.modules.setdefault(marker, types.ModuleType(marker))
    if logger is None or logger is True:
        if path is None:
            return []
        root, _, name = path.rpartition("/")
        has_tensorboard = importlib.util.find_spec("tensorboard") is not None
        default = "TensorBoardLogger" if has_tensorboard else "CSVLogger"
        further = {"purge_step": steps} if has_tensorboard and steps is not None else {}
        loggers = [flavor.get(f"loggers.{default}")(root, name=name, version="", **further)]
    else:
        loggers = list(logger) if isinstance(logger, Sequence) else [logger]
        if path is not None:
            for given in loggers:
                _redirect(given, path, rank)
    if path is not None and rank == 0 and steps is not None:
        for given in loggers:
            if is_lightning(given, "loggers.CSVLogger"):
                _keep_rows(given, steps)
    return loggers


def _keep_rows(logger: Any, steps: int) -> None:
    """Keep the rows of the run's first steps, in a file that Lightning would replace."""
    rows: list[dict[str, Any]] = []
    path = Path(logger.log_dir, "metrics.csv")
    if path.is_file():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if _step_of(row) < steps]
    logger.experiment.metrics += rows
    logger.save()


def _step_of(row: dict[str, Any]) -> float:
    """Return a row's step; infinity if the row is incomplete, because its writer was killed."""
    try:
        return float(row["step"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def _redirect(logger: Any, path: str, rank: int) -> None:
    """Redirect a logger's files to a path."""
    flavor: Any = flavor_of(logger)
    for kind in ("loggers.CSVLogger", "loggers.TensorBoardLogger"):
        if is_lightning(logger, kind):
            _copy_location(logger, flavor.get(kind)(path), path)
            return
    if is_lightning(logger, "loggers.MLFlowLogger"):
        # The client creates its folders, which several ranks cannot do at the same time.
        if rank == 0 and logger.save_dir is not None:
            # The driver has allowed MLflow to write files; otherwise this logger could not exist.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = f"file:{path}/mlruns"
            _copy_location(logger, flavor.get("loggers.MLFlowLogger")(tracking_uri=uri), uri)
        return
    # Loggers that write elsewhere have no save_dir, or one that is read-only.
    with contextlib.suppress(AttributeError):
        logger.save_dir = path


def _copy_location(logger: Any, example: Any, location: str) -> None:
    """Set the attributes that contain the location in another logger, and its MLflow client."""
    for name, value in vars(example).items():
        if value == location or type(value).__name__ == "MlflowClient":
            vars(logger)[name] = value


PROFILERS = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
}
"""Values of the param ``profiler``, and the classes that they select."""


def make_profiler(profiler: Any, path: str | None, flavor: Flavor) -> Any:
    """Return a profiler that writes below a local directory, unless it has its own directory."""
    if profiler is None or path is None:
        return profiler
    directory = f"{path}/profile"
    if isinstance(profiler, str):
        make = flavor.get(f"profilers.{PROFILERS[profiler]}")
        return make(dirpath=directory, filename=profiler)
    if is_lightning(profiler, "profilers.Profiler") and profiler.dirpath is None:
        profiler.dirpath = directory
    return profiler
