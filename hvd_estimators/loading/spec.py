"""A training job's data: its serializable description, and the data module that a rank opens.

Contains no Spark objects.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import DataError, DependencyError, ParamError
from hvd_estimators.loading.blocks import BufferPool
from hvd_estimators.loading.collate import BoundedCollate, Collate
from hvd_estimators.loading.plan import (
    BatchSizes,
    ShardPlan,
    micro_batches_per_step,
    virtual_shards,
)
from hvd_estimators.loading.readers import (
    ArrowDataModule,
    CheckedDataModule,
    DataModule,
    PlannedDataModule,
    VirtualShards,
)
from hvd_estimators.loading.transform import RowFunction, Transformation
from hvd_estimators.store.base import Store

logger = logging.getLogger(__name__)

_PETASTORM = "hvd_estimators.loading.petastorm"


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
    local_cache_dir : str or None
        Local folder that caches what is read of a remote store; None for no cache.
    local_cache_size : int
        Approximate maximum size of the cache in bytes.
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
    collate : Collate, BoundedCollate or None
        Makes batches of rows in this package's readers.
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
    local_cache_dir: str | None = None
    local_cache_size: int = 10 * 2**30
    reader_pool_type: str = "thread"
    train_reader_worker_count: int = 2
    val_reader_worker_count: int = 2
    categorical_cols: Sequence[str] | None = None
    continuous_cols: Sequence[str] | None = None
    transform_fn: RowFunction | None = None
    transformation: Transformation | None = None
    collate: BoundedCollate | Collate | None = None
    store: Store | None = None
    storage_options: Mapping[str, Any] | None = None
    verbose: int = 1


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
    data_module : str or type
        Name or class of the reader.
    options : ReaderOptions
        Options for reading rows.
    inputs : InputColumns
        The columns that ``feature_cols`` are made of.
    row_order : str or None
        See `DatasetManifest`.
    least_ranks : int or None
        The least number of ranks of a relaunch; None if a relaunch has ``num_ranks``.
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
    data_module: str | type[DataModule]
    options: ReaderOptions = ReaderOptions()
    inputs: InputColumns = field(default_factory=InputColumns)
    row_order: str | None = None
    least_ranks: int | None = None

    @property
    def field_names(self) -> list[str]:
        """Names of the columns in the files, for user-defined data modules."""
        matrices = self.inputs.matrices
        return list(
            dict.fromkeys(
                name for column in self.columns for name in matrices.get(column.name, [column.name])
            )
        )

    @property
    def num_shards(self) -> int:
        """Number of the run's canonical shards."""
        return self.train_plan.num_shards

    @property
    def passes_per_batch(self) -> int:
        """Number of micro-batches per batch; some ranks have an empty one."""
        return micro_batches_per_step(self.num_shards, self.num_ranks)

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
            If there are fewer ranks than shards, or a relaunch may have fewer.
        """
        if self.num_ranks < self.num_shards:
            ranks, remedy = self.num_ranks, f"Set num_proc={self.num_shards}, or another run_id"
            begins = f"{name}: the run began"
        elif self.least_ranks is not None and self.least_ranks < self.num_shards:
            ranks, remedy = self.least_ranks, "Leave min_num_proc out"
            begins = f"{name}, min_num_proc: the run begins"
        else:
            return
        raise ParamError(
            f"{begins} with {self.num_shards} ranks, and with {ranks} a rank takes batches of "
            f"several in turn for one step, {reason}. {remedy}."
        )

    def with_min_batch_rows(self, rows: int) -> Self:
        """Return this data with another value of `ShardPlan.min_batch_rows` for training."""
        if rows == self.train_plan.min_batch_rows:
            return self
        return replace(self, train_plan=replace(self.train_plan, min_batch_rows=rows))

    def train_batch_sizes(self) -> set[int]:
        """Return the different numbers of rows in the training batches of single shards."""
        return self.train_plan.global_batch_sizes(self.batch_size).distinct()

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
        if 0 in self.train_batch_sizes():
            raise DataError(
                f"{owner} needs a row on every rank in every step, and there are "
                f"{self.train_plan.total_rows} rows for {self.num_shards} ranks. Set num_proc or "
                "batch_size so that each rank has rows in every step."
            )

    def require_validation_rows(self) -> None:
        """Reject ranks without validation rows. Runs on the driver.

        Raises
        ------
        DataError
            If a shard has no validation rows.
        """
        if self.val_plan is not None and self.val_plan.total_rows < self.num_shards:
            raise DataError(
                f"validation: expected a row for each of {self.num_shards} ranks at least, found "
                f"{self.val_plan.total_rows}. Hold out more rows, or set num_proc to "
                f"{max(self.val_plan.total_rows, 1)} or less."
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
        steps = range(self.train_steps_per_epoch + 1)
        batches = bisect.bisect_left(steps, rows, key=lambda step: self.rows_after(epoch, step))
        if batches not in steps or self.rows_after(epoch, batches) != rows:
            raise ValueError(f"No batch of epoch {epoch} ends after {rows} rows.")
        return batches

    def _rows_before(self, step: int) -> int:
        """Return the number of rows, over all shards, in the run's steps before ``step``."""
        sizes = self._global_batch_sizes
        passes, left = divmod(step, len(sizes))
        return passes * sizes.before(len(sizes)) + sizes.before(left)

    @functools.cached_property
    def _global_batch_sizes(self) -> BatchSizes:
        return self.train_plan.global_batch_sizes(self.batch_size)


def check_data_module(data_module: str | type[DataModule] | None) -> None:
    """Check that a data module can be created. Runs on the driver.

    Raises
    ------
    ParamError
        If it is neither a known name nor a subclass of `DataModule`.
    DependencyError
        If it needs a package that cannot be imported.
    """
    if isinstance(data_module, type) and issubclass(data_module, DataModule):
        return
    if data_module is None or data_module == "arrow":
        return
    if data_module != "petastorm":
        raise ParamError(
            "data_module: expected 'petastorm', 'arrow' or a class derived from "
            f"hvd_estimators.loading.readers.DataModule, found {data_module!r}."
        )
    try:
        importlib.import_module(_PETASTORM)
    except ImportError as error:
        raise DependencyError(
            f"data_module='petastorm' needs Petastorm, which cannot be imported ({error}). Set "
            f"data_module='arrow', which reads the same files, or run: {INSTALL['petastorm']}"
        ) from error


def choose_data_module(data_module: str | type[DataModule] | None) -> str | type[DataModule]:
    """Return the data module for all ranks. Runs on the driver.

    None means Petastorm if the driver can import it, otherwise PyArrow.
    """
    if data_module is None:
        data_module = "petastorm"
        try:
            importlib.import_module(_PETASTORM)
        except ImportError:
            # Importing an installed Petastorm can fail with current versions of PyArrow.
            data_module = "arrow"
    logger.info("data_module: %r reads the rows on all ranks", data_module)
    return data_module


def check_shards(
    data_module: str | type[Any] | None, num_shards: int, num_ranks: int, run_id: str | None
) -> None:
    """Check that the given number of ranks can run a run's shards. Runs on the driver.

    Parameters
    ----------
    data_module : str, type or None
        Name or class of the data module.
    num_shards, num_ranks : int
        Number of the run's canonical shards, and number of ranks.
    run_id : str or None
        The run, for messages.

    Raises
    ------
    ParamError
        If there are more ranks than shards. Also if there are fewer ranks than shards and the data
        module is user-defined, because it reads only one shard per rank.
    """
    if num_ranks > num_shards:
        raise ParamError(
            f"num_proc: the run {run_id!r} began with {num_shards} ranks, which share each "
            f"global batch, and cannot resume with more, found {num_ranks}. Set num_proc to "
            f"{num_shards} or less, or another run_id."
        )
    if num_ranks < num_shards and not reads_several(data_module):
        raise ParamError(
            f"data_module: the run {run_id!r} began with {num_shards} ranks, and with {num_ranks} "
            f"some have to read for two. {data_module!r} reads for one: only data modules of this "
            f"package can read for several. Set num_proc={num_shards}, or another run_id."
        )


def reads_several(data_module: str | type[Any] | None) -> bool:
    """Return whether a rank can read several shards; False for user-defined data modules."""
    return not isinstance(data_module, type) or issubclass(data_module, PlannedDataModule)


def open_data_module(
    data: DataSpec,
    rank: int,
    size: int,
    *,
    epoch: int,
    rows: int = 0,
    epochs: int,
    memory: BufferPool | None = None,
) -> DataModule:
    """Create a rank's data module. Runs on ranks.

    Parameters
    ----------
    data : DataSpec
        The data of the job.
    rank, size : int
        This rank and the number of ranks.
    epoch : int
        The first epoch to train.
    rows : int
        Rows of that epoch, over all shards, that were already trained on; see
        `DataSpec.rows_after`.
    epochs : int
        Number of remaining epochs, including the first one.
    memory : BufferPool, optional
        Allocates the batches; not used by user-defined data modules.

    Returns
    -------
    DataModule
        With as many ranks as shards, a data module with one batch per step. With fewer ranks, a
        `VirtualShards` with several micro-batches per step. A user-defined data module is wrapped
        in a `CheckedDataModule`.

    Raises
    ------
    ValueError
        If no step ends after ``rows`` rows.
    ParamError
        See `check_shards`.
    """
    per_epoch = data.train_steps_per_epoch
    first = epoch * per_epoch + data.batches_before(epoch, rows)
    steps = range(first, (epoch + epochs) * per_epoch)
    if size == data.num_shards:
        return _open_shard(data, rank, steps, memory)
    check_shards(data.data_module, data.num_shards, size, None)
    shards = virtual_shards(data.num_shards, rank, size)
    workers = {
        name: max(getattr(data.options, name) // len(shards), 1)
        for name in ("train_reader_worker_count", "val_reader_worker_count")
    }
    data = replace(data, options=replace(data.options, **workers))
    opened = [_open_shard(data, shard, steps, memory) for shard in shards]
    modules = [module for module in opened if isinstance(module, PlannedDataModule)]
    for module in modules:
        module.footers = modules[0].footers
    return VirtualShards(modules, size)


def _open_shard(data: DataSpec, shard: int, steps: range, memory: BufferPool | None) -> DataModule:
    """Create the data module of one shard, for some steps of the run."""
    module = _module_class(data.data_module)(
        train_dir=data.train_path,
        val_dir=data.val_path,
        num_train_epochs=steps.stop // data.train_steps_per_epoch,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        cur_shard=shard,
        shard_count=data.num_shards,
        schema_fields=data.field_names,
        steps_per_epoch_train=data.train_steps_per_epoch,
        steps_per_epoch_val=data.validation_steps_per_epoch,
        columns=data.columns,
        train_plan=data.train_plan,
        val_plan=data.val_plan,
        random_seed=data.random_seed,
        skip_train_steps=steps.start,
        total_train_steps=steps.stop,
        label_cols=data.label_cols,
        **vars(data.options),
    )
    if isinstance(module, PlannedDataModule):
        module.memory = memory or module.memory
        return module
    return CheckedDataModule(
        module,
        rank=shard,
        steps=data.train_steps_per_epoch,
        skip_steps=steps.start,
        has_val_rows=data.val_plan is not None and data.val_plan.rows(shard) > 0,
        inputs=data.inputs,
    )


def _module_class(data_module: str | type[DataModule]) -> type[DataModule]:
    if isinstance(data_module, type):
        return data_module
    if data_module == "arrow":
        return ArrowDataModule
    try:
        from hvd_estimators.loading.petastorm import PetastormDataModule
    except ImportError as error:
        raise DependencyError(
            "data_module: the driver chose 'petastorm' for all ranks, and the host "
            f"{socket.gethostname()} cannot import the package petastorm ({error}). Install it on "
            f"all executors ({INSTALL['petastorm']}), or set data_module='arrow', which reads the "
            "same files."
        ) from error
    return PetastormDataModule
