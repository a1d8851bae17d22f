"""The data of a training job, as the driver tells the ranks: values only, no Spark objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvd_estimators.loading.readers.base import DataModule
from hvd_estimators.loading.sharding import ShardPlan
from hvd_estimators.loading.transformation import RowFunction, Transformation
from hvd_estimators.parquet.manifest import ColumnSpec

__all__ = ["DataSpec", "ReaderOptions"]


@dataclass(frozen=True)
class ReaderOptions:
    """How rows are read; a data module gets each field as a keyword argument.

    Attributes
    ----------
    shuffle : bool
        Whether training rows come in random order.
    shuffle_buffer_size : int or None
        Bytes of rows that are held for shuffling; None for the reader's default.
    inmemory_cache_all : bool
        Keep the rows in memory after the first pass.
    cache_type : {"null", "local-disk"}
        What keeps row groups on disk. Petastorm only.
    cache_location : str or None
        Directory of that cache; None for that of temporary files.
    cache_size_limit : int
        Bytes that it may hold, about.
    reader_pool_type : {"thread", "process", "dummy"}
        How readers work in parallel.
    train_reader_worker_count, val_reader_worker_count : int
        Readers that work in parallel.
    categorical_cols, continuous_cols : sequence of str or None
        Columns of these kinds, for data modules of the user's.
    transform_fn : callable or None
        The user's function of rows, for data modules of the user's.
    transformation : Transformation or None
        What this package's readers make of rows; ``transform_fn`` included.
    storage_options : mapping or None
        Passed to the store's fsspec filesystem.
    verbose : int
        0 is silent.
    """

    shuffle: bool = True
    shuffle_buffer_size: int | None = None
    inmemory_cache_all: bool = False
    cache_type: str = "null"
    cache_location: str | None = None
    cache_size_limit: int = 10 * 2**30
    reader_pool_type: str = "thread"
    train_reader_worker_count: int = 2
    val_reader_worker_count: int = 2
    categorical_cols: Sequence[str] | None = None
    continuous_cols: Sequence[str] | None = None
    transform_fn: RowFunction | None = None
    transformation: Transformation | None = None
    storage_options: Mapping[str, Any] | None = None
    verbose: int = 1

    def as_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a data module."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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
        Which shard has which rows; ``val_plan`` is None without validation.
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
    options : ReaderOptions
        How rows are read.
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
    options: ReaderOptions = ReaderOptions()
