"""Training specification for ranks, and their results: plain values, no Spark objects.

The results contain the metrics of each epoch, one of which selects the best epoch. They also
contain digests of the weights, with which ranks and driver check that all ranks agree.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, did_you_mean
from hvd_estimators.launch.rank.preemption import PreemptionCheck
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.leases import FencingToken

HistoryRow = tuple[int, str, str, float]
"""Epoch (from 0), stage (``"train"`` or ``"validation"``), name and value."""

_VALIDATION = "val_"
_CAPITALIZED = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z]*\d*")

_LESS = ("loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "crossentropy")
_MORE = (
    *("acc", "accuracy", "auc", "auroc", "precision", "recall", "f1", "fbeta", "fmeasure", "iou"),
    *("r2", "similarity", "dice"),
)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options that decide which checkpoints of a run are written and kept.

    Attributes
    ----------
    framework : str
        Framework that writes the checkpoints.
    keep : int
        Number of newest checkpoints to keep.
    monitor : str or None
        Metric that selects the best checkpoint, which is also kept. None means ``val_loss``, or
        ``loss`` without validation.
    mode : str
        Whether lower or higher values are better, see `mode_of`.
    every_n_steps : int or None
        Optimizer steps of the run between two mid-epoch checkpoints; None disables these.
    fence : FencingToken or None
        Checks whether these ranks may still write to the run; None if they always may.
    """

    framework: str
    keep: int = 2
    monitor: str | None = None
    mode: str = "auto"
    every_n_steps: int | None = None
    fence: FencingToken | None = None

    def due_after(self, step: int) -> bool:
        """Return whether a checkpoint is due after an optimizer step of the run, from 1.

        The caller need not ask after an epoch's last step, because each epoch ends with a
        checkpoint.
        """
        return self.every_n_steps is not None and step % self.every_n_steps == 0


@dataclass(frozen=True)
class TrainSpec:
    """Training specification, for the trainers of all frameworks.

    Attributes
    ----------
    data : DataSpec
        The data.
    store : Store
        Opens checkpoints.
    run : RunPaths
        Paths of the run's artefacts.
    epochs : int
        Epochs of the whole run, including earlier fits.
    scale_learning_rate : bool
        Multiply the learning rate by the number of canonical shards: the run's first number of
        ranks.
    backward_passes_per_step : int
        Batches whose gradients are averaged for an optimizer step.
    gradient_compression : object or None
        Horovod compressor of gradients.
    use_gpu : bool
        Train on the rank's GPU if it has one.
    mp_start_method : str or None
        Start method of ``multiprocessing`` in the rank.
    callbacks : tuple of object
        The user's callbacks, of the framework's kind.
    verbose : int
        0 disables output.
    checkpoints : CheckpointOptions
        Options that decide which checkpoints are written and kept.
    resume_stopped : bool
        Resume a run that a callback stopped.
    terminate_on_nan : bool
        End training on all ranks if a loss or a parameter is not finite.
    preemption_check : callable or None
        The user's function that returns whether this rank's machine is about to go.
    buffer_reduction : mapping
        Buffer name to reduction, see `training.shard_state.find_buffers`.
    """

    data: DataSpec
    store: Store
    run: RunPaths
    epochs: int
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
    preemption_check: PreemptionCheck | None
    buffer_reduction: Mapping[str, str]

    def steps_done(self, epoch: int, batches: int) -> int:
        """Return the run's optimizer steps after some epochs, and some batches of the next epoch.

        Parameters
        ----------
        epoch : int
            Number of completed epochs.
        batches : int
            Batches of each shard. The epoch's last step may have fewer batches than other steps.
        """
        return epoch * self._steps(self.data.train_steps_per_epoch) + self._steps(batches)

    def _steps(self, batches: int) -> int:
        return -(-batches // self.backward_passes_per_step)


@dataclass(frozen=True)
class EpochMetrics:
    """One epoch of a run's history; ``getHistory()`` contains the result of `as_dict`."""

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
        """Return one row per number, first of training, then of validation."""
        return [
            (self.epoch, stage, name, value)
            for stage, values in (("train", self.train), ("validation", self.validation or {}))
            for key, entry in values.items()
            for name, value in _numbers(str(key), entry)
        ]


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield all numbers of a metric value, including those in metric groups and arrays."""
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
        # A row cannot hold complex numbers, or several numbers in an array that is not NumPy's.
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            yield name, float(value)


def measured(record: EpochMetrics) -> dict[str, float]:
    """Return the metrics of an epoch by name; see `measured_rows`."""
    return measured_rows([row[1:] for row in record.rows()])


def measured_rows(rows: Iterable[Sequence[Any]]) -> dict[str, float]:
    """Return the values of rows of stage, name and value, by name.

    Names of validation metrics begin with ``val_``.
    """
    return {
        name if stage == "train" else f"{_VALIDATION}{name.removeprefix(_VALIDATION)}": value
        for stage, name, value in rows
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


@dataclass(frozen=True)
class TrainResult:
    """Result of a rank.

    Attributes
    ----------
    weights_digest : str
        Digest of the final parameters; the same on all ranks.
    state : bytes, LocalFile or None
        State from which the driver creates the fitted model, in the framework's own form and with
        the user's learning rate. Rank 0 only. A file in the store transfers it from the ranks to
        the driver.
    history : tuple of EpochMetrics
        One record per epoch of the whole run.
    state_digest : str
        SHA-256 digest of that file; empty without a file.
    state_is_file : bool
        Whether the driver also gets the state as a `LocalFile`.
    output_shapes : tuple of tuple of int, or None
        Shape of one row of each output, as the ranks observed it; None if they did not check.
    stopped : bool
        Whether a callback stopped the run, in this fit or an earlier one.
    weight_digests : mapping
        Name of a parameter to its digest; empty if the framework provides only one digest for all.
    """

    weights_digest: str
    state: bytes | LocalFile | None
    history: tuple[EpochMetrics, ...]
    state_digest: str = ""
    state_is_file: bool = False
    output_shapes: tuple[tuple[int, ...], ...] | None = None
    stopped: bool = False
    weight_digests: Mapping[str, str] = field(default_factory=dict)


_MOST_NAMES = 8

_CAUSES = (
    "Ranks stay equal if weights change only by the steps of torch optimizers, after backward(). "
    "Look for code that changes weights in another way, or differently on each rank: random "
    "numbers, files, hvd.rank(), an embedding with max_norm. If the model sets its weights at its "
    "first call, as gpytorch's variational models do, call the model once before fit()."
)


def array_digest(array: Array) -> bytes:
    """Return the SHA-256 digest of an array's bits."""
    # As bytes, because NumPy provides no buffer of bfloat16.
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


def weight_digest(array: Array) -> str:
    """Return a short digest of a weight's bits, for `TrainResult.weight_digests`."""
    return array_digest(array).hex()[:16]


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return one digest of all weights."""
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()


def unequal_weights(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of weights that differ between ranks, in the model's order."""
    names = dict.fromkeys(name for digests in by_rank for name in digests)
    return [name for name in names if len({digests.get(name) for digests in by_rank}) > 1]


def check_equal_weights(by_rank: Sequence[Mapping[str, str]], epoch: int, run: RunPaths) -> None:
    """Reject weights that differ between ranks after the first epoch of a fit.

    Raises
    ------
    HvdEstimatorsError
        If weights differ; the message names them.
    """
    names = unequal_weights(by_rank)
    if names:
        raise HvdEstimatorsError(
            f"After epoch {epoch}, the first of this fit, the ranks have different weights: "
            f"{named_weights(names)}. Run {run.run_id!r} ends here. {_CAUSES}"
        )


def named_weights(names: Sequence[str]) -> str:
    """Return the names for a message, shortened if there are many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
