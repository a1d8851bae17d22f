"""What the driver tells the ranks, and what a rank answers: values only, no Spark objects."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.leases import FencingToken

__all__ = ["CheckpointOptions", "EpochMetrics", "HistoryRow", "TrainResult", "TrainSpec"]

HistoryRow = tuple[int, str, str, float]
"""Epoch (from 0), stage (``"train"`` or ``"validation"``), name and value."""


LONG_VALIDATION = 10.0
"""Seconds of a validation that are worth a checkpoint: many times what one takes."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Which checkpoints of a run are kept.

    Attributes
    ----------
    framework : str
        What they are written by.
    keep : int
        How many of the newest.
    monitor : str or None
        The metric by which the best is kept, too; None for ``val_loss``, or ``loss`` without
        validation.
    mode : str
        Whether less or more of it is better, see `hvd_estimators.training.monitoring.mode_of`.
    every_n_steps : int or None
        Optimizer steps of the run between two checkpoints within an epoch; None for none.
    fence : FencingToken or None
        Tells whether these ranks are still to write to the run; None for ones that always are.
    long_validation : float
        Seconds of a validation from which on a checkpoint is written before the next one.
    """

    framework: str
    keep: int = 2
    monitor: str | None = None
    mode: str = "auto"
    every_n_steps: int | None = None
    fence: FencingToken | None = None
    long_validation: float = LONG_VALIDATION

    def due_after(self, step: int) -> bool:
        """Return whether a checkpoint is due after an optimizer step of the run, from 1.

        After an epoch's last step there is no need to ask: each epoch ends with one.
        """
        return self.every_n_steps is not None and step % self.every_n_steps == 0


@dataclass(frozen=True)
class TrainSpec:
    """What the trainers of all frameworks are told.

    Attributes
    ----------
    data : DataSpec
        The data.
    store : Store
        Opens checkpoints.
    run : RunPaths
        Where the run's artefacts go.
    epochs : int
        Epochs of the whole run, those of an earlier part of it included.
    random_seed : int or None
        Seed of the framework's random numbers.
    scale_learning_rate : bool
        Multiply the learning rate by the number of ranks for training.
    backward_passes_per_step : int
        Batches whose gradients are added up before one step of the optimizer.
    gradient_compression : object or None
        Horovod compressor of gradients.
    use_gpu : bool
        Train on the rank's GPU where there is one.
    mp_start_method : str or None
        Start method of ``multiprocessing`` in the rank.
    callbacks : tuple of object
        The user's, of the framework's kind.
    verbose : int
        0 is silent.
    checkpoints : CheckpointOptions
        Which checkpoints are kept.
    resume_stopped : bool
        Go on with a run that a callback has stopped.
    terminate_on_nan : bool
        End training on all ranks when a loss or a parameter is not finite.
    buffer_reduction : mapping
        Buffer name to reduction, see `training.buffer_reduction`.
    """

    data: DataSpec
    store: Store
    run: RunPaths
    epochs: int
    random_seed: int | None
    scale_learning_rate: bool
    backward_passes_per_step: int
    gradient_compression: Any
    use_gpu: bool
    mp_start_method: str | None
    callbacks: tuple[Callable[..., Any] | Any, ...]
    verbose: int
    checkpoints: CheckpointOptions
    resume_stopped: bool
    terminate_on_nan: bool
    buffer_reduction: Mapping[str, str]

    def steps_done(self, epoch: int, batches: int) -> int:
        """Return the optimizer steps of the run after so many epochs, and batches of the next one.

        Parameters
        ----------
        epoch : int
            Epochs that are done.
        batches : int
            Batches of each shard. Those of the epoch's last step may be fewer than of others.
        """
        return epoch * self._steps(self.data.train_steps_per_epoch) + self._steps(batches)

    def steps_left(self, batches: int) -> int:
        """Return the optimizer steps that an epoch has left after so many batches of each shard."""
        return self._steps(self.data.train_steps_per_epoch) - self._steps(batches)

    def _steps(self, batches: int) -> int:
        return -(-batches // self.backward_passes_per_step)


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch of a run's history; what `as_dict` returns is what ``getHistory()`` holds."""

    epoch: int
    train: Mapping[str, Any]
    validation: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as nested dicts."""
        record: dict[str, Any] = {"epoch": self.epoch, "train": dict(self.train)}
        if self.validation is not None:
            record["validation"] = dict(self.validation)
        return record

    def rows(self) -> list[HistoryRow]:
        """Return a row per number, those of training first."""
        return [
            (self.epoch, stage, name, value)
            for stage, measured in (("train", self.train), ("validation", self.validation or {}))
            for key, entry in measured.items()
            for name, value in _numbers(str(key), entry)
        ]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of what was measured: of groups of metrics, and of arrays, each."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _numbers(str(key), entry)
    elif isinstance(value, np.ndarray) and value.ndim:
        yield from _numbers(name, value.tolist())
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _numbers(f"{name}_{index}", entry)
    elif value is None:
        yield name, math.nan
    elif isinstance(value, numbers.Number) or hasattr(value, "item"):
        # A complex number, or many that are no array of NumPy's, have no place in a row.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            yield name, float(value)


@dataclass(frozen=True)
class TrainResult:
    """What a rank answers.

    Attributes
    ----------
    weights_digest : str
        Digest of the final parameters; the same on all ranks.
    state : bytes, LocalFile or None
        What the driver makes the fitted model of, with the learning rate as the user gave it, in
        the framework's own form. Rank 0 only; between the ranks and the driver a file of the store
        takes its place.
    history : tuple of EpochMetrics
        One record per epoch of the whole run.
    state_digest : str
        SHA-256 of that file; empty where there is none.
    state_is_file : bool
        Whether the driver, too, gets the state as a `LocalFile`.
    output_shapes : tuple of tuple of int, or None
        Shape of one row of each output, as the ranks saw it; None where they did not look.
    stopped : bool
        Whether a callback has stopped the run, in this fit or an earlier one.
    weight_digests : mapping
        Name of a parameter to its digest; empty where the framework gives only one for all.
    """

    weights_digest: str
    state: bytes | LocalFile | None
    history: tuple[EpochMetrics, ...]
    state_digest: str = ""
    state_is_file: bool = False
    output_shapes: tuple[tuple[int, ...], ...] | None = None
    stopped: bool = False
    weight_digests: Mapping[str, str] = field(default_factory=dict)
