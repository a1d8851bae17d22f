"""What the driver tells the ranks, and what a rank answers: values only, no Spark objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_estimators.loading.readers.base import DataModule
from hvd_estimators.loading.sharding import ShardPlan
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.store.base import RunPaths, Store

__all__ = ["DataSpec", "EpochMetrics", "TrainResult", "TrainSpec"]


@dataclass(frozen=True)
class DataSpec:
    """The data of a training job and how it is read.

    Attributes
    ----------
    columns : tuple of ColumnSpec
        The columns that are read.
    train_path, val_path : str
        Where the Parquet files lie; ``val_path`` is None without validation.
    train_plan, val_plan : ShardPlan
        Which rank reads what; ``val_plan`` is None without validation.
    feature_cols, label_cols : tuple of str
        Inputs and targets, in the order in which the model takes and gives them.
    sample_weight_col : str or None
        Weight of each row.
    batch_size, val_batch_size : int
        Rows of a full batch of one rank.
    train_steps_per_epoch, validation_steps_per_epoch : int
        Batches of an epoch on each rank.
    random_seed : int
        Seed of the rows' order.
    data_module : str, type or None
        Name or class of the reader; None for Petastorm where it imports, PyArrow otherwise.
    options : mapping
        Further keyword arguments of the data module.
    """

    columns: tuple[ColumnSpec, ...]
    train_path: str
    val_path: str | None
    train_plan: ShardPlan
    val_plan: ShardPlan | None
    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    sample_weight_col: str | None
    batch_size: int
    val_batch_size: int
    train_steps_per_epoch: int
    validation_steps_per_epoch: int
    random_seed: int
    data_module: str | type[DataModule] | None
    options: Mapping[str, Any] = field(default_factory=dict)


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
    verbose : int
        0 is silent.
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


@dataclass(frozen=True)
class TrainResult:
    """What a rank answers.

    Attributes
    ----------
    weights_digest : str
        Digest of the final parameters; the same on all ranks.
    state : bytes or None
        What the driver makes the fitted model of, with the learning rate as the user gave it, in
        the framework's own form. Rank 0 only; between the ranks and the driver a file of the store
        takes its place.
    history : tuple of EpochMetrics
        One record per epoch of the whole run.
    state_digest : str
        SHA-256 of that file; empty where there is none.
    """

    weights_digest: str
    state: bytes | None
    history: tuple[EpochMetrics, ...]
    state_digest: str = ""
