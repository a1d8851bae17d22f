"""The data of a training job as the ranks are told: values only, no Spark objects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.plan import ShardPlan
from hvd_estimators.loading.reader import DataModule
from hvd_estimators.loading.transform import RowFunction, Transformation
from hvd_estimators.store.base import Store

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
    store : Store or None
        Opens the files; None for that of the training files' path.
    storage_options : mapping or None
        The store's, for data modules of the user's.
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
    store: Store | None = None
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
        Which shard has which rows; ``val_plan`` is None without validation. Both are made for the
        run's canonical shards.
    num_ranks : int
        Number of ranks that play the shards, at most as many.
    feature_cols, label_cols : tuple of str
        Inputs and targets, in the order in which the model takes and gives them.
    sample_weight_col : str or None
        Weight of each row.
    batch_size, val_batch_size : int
        Rows of a full batch of one shard.
    train_steps_per_epoch, validation_steps_per_epoch : int
        Batches of an epoch in each shard.
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
    num_ranks: int
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

    @property
    def num_shards(self) -> int:
        """Number of the run's canonical shards."""
        return self.train_plan.num_shards

    @property
    def passes_per_batch(self) -> int:
        """Shards that a rank plays for each batch, one of them empty on some ranks."""
        return -(-self.num_shards // self.num_ranks)

    def require_one_shard_per_rank(self, name: str, reason: str) -> None:
        """Refuse what cannot play several shards. Runs on the driver.

        Parameters
        ----------
        name : str
            The param.
        reason : str
            What cannot be done, as the end of a sentence.

        Raises
        ------
        ParamError
            If there are fewer ranks than shards.
        """
        if self.num_ranks < self.num_shards:
            raise ParamError(
                f"{name}: the run began with {self.num_shards} ranks, and with {self.num_ranks} "
                f"a rank takes batches of several in turn for one step, {reason}. Set "
                f"num_proc={self.num_shards}, or another run_id."
            )

    def rows_after(self, epoch: int, batches: int) -> int:
        """Return the rows, of all shards, in the first batches of an epoch.

        Together with the epoch this is a position in the data that does not depend on who reads it.
        """
        first = epoch * self.train_steps_per_epoch
        return self._rows_before(first + batches) - self._rows_before(first)

    def batches_before(self, epoch: int, rows: int) -> int:
        """Return the number of batches that hold an epoch's first rows; undoes `rows_after`.

        Raises
        ------
        ValueError
            If no batch of the epoch ends there.
        """
        for batches in range(self.train_steps_per_epoch + 1):
            if self.rows_after(epoch, batches) == rows:
                return batches
        raise ValueError(f"No batch of epoch {epoch} ends after {rows} rows.")

    def _rows_before(self, step: int) -> int:
        """Return the rows, of all shards, in the steps of the run before one."""
        ends = self._ends
        passes, left = divmod(step, len(ends) - 1)
        return passes * ends[-1] + ends[left]

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Rows, of all shards, after each step of a pass over the data; 0 first."""
        sizes = self.train_plan.global_batch_sizes(self.batch_size)
        return list(itertools.accumulate(sizes, initial=0))
