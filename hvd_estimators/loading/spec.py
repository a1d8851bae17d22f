"""Serializable description of a training job's data. Contains no Spark objects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.loading.plan import ShardPlan
from hvd_estimators.loading.reader import DataModule
from hvd_estimators.loading.transform import RowFunction, Transformation
from hvd_estimators.store.base import Store

__all__ = ["DataSpec", "ReaderOptions"]


@dataclass(frozen=True)
class ReaderOptions:
    """Options for reading rows. A data module receives each field as a keyword argument.

    Attributes
    ----------
    shuffle : bool
        Whether training rows are shuffled.
    shuffle_buffer_size : int or None
        Size of the shuffle buffer in bytes; None for the reader's default.
    inmemory_cache_all : bool
        Keep the rows in memory after the first pass.
    cache_type : {"null", "local-disk"}
        Type of Petastorm's disk cache. Petastorm only.
    cache_location : str or None
        Directory of the disk cache; None for the system's temporary directory.
    cache_size_limit : int
        Approximate maximum size of the disk cache in bytes.
    reader_pool_type : {"thread", "process", "dummy"}
        Type of the reader's worker pool.
    train_reader_worker_count, val_reader_worker_count : int
        Number of workers of the pool.
    categorical_cols, continuous_cols : sequence of str or None
        Categorical and continuous columns, for user-defined data modules.
    transform_fn : callable or None
        The user's row function, for user-defined data modules.
    transformation : Transformation or None
        Transformation of rows for this package's readers; includes ``transform_fn``.
    store : Store or None
        Opens the files; None for a store at the path of the training files.
    storage_options : mapping or None
        The store's options, for user-defined data modules.
    verbose : int
        0 disables output.
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
        """Return the options as keyword arguments of a data module."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class DataSpec:
    """The data of a training job and its reading options.

    Attributes
    ----------
    columns : tuple of ColumnSpec
        The columns to read.
    train_path, val_path : str
        Paths of the Parquet files; ``val_path`` is None without validation.
    train_plan, val_plan : ShardPlan
        Assignment of rows to the run's canonical shards; ``val_plan`` is None without validation.
    num_ranks : int
        Number of ranks that run the shards; at most the number of shards.
    feature_cols, label_cols : tuple of str
        Inputs and targets, in the order of the model's inputs and outputs.
    sample_weight_col : str or None
        Column with the weight of each row.
    batch_size, val_batch_size : int
        Rows in a full batch of one shard.
    train_steps_per_epoch, validation_steps_per_epoch : int
        Batches of an epoch in each shard.
    random_seed : int
        Seed of the row order.
    data_module : str, type or None
        Name or class of the reader. None selects Petastorm if it can be imported, otherwise
        PyArrow.
    options : ReaderOptions
        Options for reading rows.
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
        """Number of micro-batches per batch; some ranks have an empty one."""
        return -(-self.num_shards // self.num_ranks)

    def require_one_shard_per_rank(self, name: str, reason: str) -> None:
        """Reject a param that does not support virtual shards. Runs on the driver.

        Parameters
        ----------
        name : str
            The param.
        reason : str
            The reason, as the end of a sentence.

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

    def train_batch_sizes(self) -> list[int]:
        """Return the number of rows in each batch of an epoch, over all shards."""
        plan = self.train_plan
        return [
            size
            for shard in range(plan.num_shards)
            for size in plan.batch_sizes(shard, self.batch_size)
        ]

    def require_rows_in_batches(self, owner: str) -> None:
        """Reject training batches without rows. Runs on the driver.

        Parameters
        ----------
        owner : str
            Feature that needs the rows, for the message.

        Raises
        ------
        DataError
            If a batch has no rows.
        """
        sizes = self.train_batch_sizes()
        if 0 in sizes:
            raise DataError(
                f"{owner} needs a row on every rank in every step, and there are {sum(sizes)} rows "
                f"for {self.num_shards} ranks. Set num_proc or batch_size so that each rank has "
                "rows in every step."
            )

    def rows_after(self, epoch: int, batches: int) -> int:
        """Return the number of rows, over all shards, in the first batches of an epoch.

        Together with the epoch, it is a position in the data that does not depend on the number of
        ranks.
        """
        first = epoch * self.train_steps_per_epoch
        return self._rows_before(first + batches) - self._rows_before(first)

    def batches_before(self, epoch: int, rows: int) -> int:
        """Return the number of batches that contain an epoch's first rows; inverse of `rows_after`.

        Raises
        ------
        ValueError
            If no batch of the epoch ends after these rows.
        """
        for batches in range(self.train_steps_per_epoch + 1):
            if self.rows_after(epoch, batches) == rows:
                return batches
        raise ValueError(f"No batch of epoch {epoch} ends after {rows} rows.")

    def _rows_before(self, step: int) -> int:
        """Return the number of rows, over all shards, in the run's steps before ``step``."""
        ends = self._ends
        passes, left = divmod(step, len(ends) - 1)
        return passes * ends[-1] + ends[left]

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Cumulative number of rows, over all shards, after each step of a pass; begins with 0."""
        sizes = self.train_plan.global_batch_sizes(self.batch_size)
        return list(itertools.accumulate(sizes, initial=0))
