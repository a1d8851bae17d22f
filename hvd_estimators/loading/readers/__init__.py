"""Readers: row ranges of Parquet files to batches of columns."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.loading.readers.base import DataModule
from hvd_estimators.loading.readers.delivery import HeldDataModule
from hvd_estimators.loading.readers.planned import PlannedDataModule
from hvd_estimators.loading.readers.shards import PlayedShards
from hvd_estimators.loading.rows import Memory
from hvd_estimators.loading.sharding import played_shards
from hvd_estimators.remedies import INSTALL

if TYPE_CHECKING:
    from hvd_estimators.loading.spec import DataSpec

__all__ = ["DataModule", "check_data_module", "check_shards", "open_data_module", "reads_several"]


def check_data_module(data_module: str | type[DataModule] | None) -> None:
    """Make sure that a data module can be made. Runs on the driver.

    Raises
    ------
    ParamError
        If it is neither a known name nor a class derived from `DataModule`.
    DependencyError
        If it needs a package that is not installed.
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
    if importlib.util.find_spec("petastorm") is None:
        raise DependencyError(
            "data_module='petastorm' needs Petastorm, which is not installed. Set "
            f"data_module='arrow', which reads the same files, or run: {INSTALL['petastorm']}"
        )


def check_shards(
    data_module: str | type[Any] | None, num_shards: int, num_ranks: int, run_id: str | None
) -> None:
    """Make sure that ranks can play a run's shards. Runs on the driver.

    Parameters
    ----------
    data_module : str, type or None
        What reads the rows.
    num_shards, num_ranks : int
        The run's canonical shards, and the ranks that are to play them.
    run_id : str or None
        The run, for messages.

    Raises
    ------
    ParamError
        If there are more ranks than shards, or if a module of the user's, which reads one shard
        on each rank, would have to read several.
    """
    if num_ranks > num_shards:
        raise ParamError(
            f"num_proc: the run {run_id!r} began with {num_shards} ranks, which share out each "
            f"global batch, and cannot go on with more, found {num_ranks}. Set num_proc to "
            f"{num_shards} or less, or another run_id."
        )
    if num_ranks < num_shards and not reads_several(data_module):
        raise ParamError(
            f"data_module: the run {run_id!r} began with {num_shards} ranks, and with {num_ranks} "
            f"some have to read for two. {data_module!r} reads for one: only data modules of this "
            f"package can read for several. Set num_proc={num_shards}, or another run_id."
        )


def reads_several(data_module: str | type[Any] | None) -> bool:
    """Return whether a rank can read several shards, as ours let it; not with a user's own."""
    return not isinstance(data_module, type) or issubclass(data_module, PlannedDataModule)


def open_data_module(
    data: DataSpec,
    rank: int,
    size: int,
    *,
    epoch: int,
    rows: int = 0,
    epochs: int,
    memory: Memory | None = None,
) -> DataModule:
    """Make a rank's data module. Runs on the worker.

    Parameters
    ----------
    data : DataSpec
        The data of the job.
    rank, size : int
        This rank and the number of ranks.
    epoch : int
        The epoch to begin with.
    rows : int
        Rows of that epoch, of all shards, that were trained on before; see `DataSpec.rows_after`.
    epochs : int
        Epochs that are left, this one included.
    memory : Memory, optional
        Where the batches' memory comes from; not with a data module of the user's.

    Returns
    -------
    DataModule
        With as many ranks as shards it has one batch per step; with fewer, `PlayedShards`, which
        has several. One of the user's is held to what it has to deliver.

    Raises
    ------
    ValueError
        If no step ends after so many rows.
    ParamError
        See `check_shards`.
    """
    skip_steps = epoch * data.train_steps_per_epoch + data.batches_before(epoch, rows)
    if size == data.num_shards:
        return _open_shard(data, rank, skip_steps, epochs, memory)
    check_shards(data.data_module, data.num_shards, size, None)
    shards = played_shards(data.num_shards, rank, size)
    workers = {
        name: max(getattr(data.options, name) // len(shards), 1)
        for name in ("train_reader_worker_count", "val_reader_worker_count")
    }
    data = replace(data, options=replace(data.options, **workers))
    opened = [_open_shard(data, shard, skip_steps, epochs, memory) for shard in shards]
    modules = [module for module in opened if isinstance(module, PlannedDataModule)]
    for module in modules:
        module.footers = modules[0].footers
    return PlayedShards(modules, size)


def _open_shard(
    data: DataSpec, shard: int, skip_steps: int, epochs: int, memory: Memory | None
) -> DataModule:
    """Make the data module of one shard, without the first steps of the run."""
    module = _module_class(data.data_module)(
        train_dir=data.train_path,
        val_dir=data.val_path,
        num_train_epochs=epochs,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        cur_shard=shard,
        shard_count=data.num_shards,
        schema_fields=[column.name for column in data.columns],
        steps_per_epoch_train=data.train_steps_per_epoch,
        steps_per_epoch_val=data.validation_steps_per_epoch,
        columns=data.columns,
        train_plan=data.train_plan,
        val_plan=data.val_plan,
        random_seed=data.random_seed,
        skip_train_steps=skip_steps,
        label_cols=data.label_cols,
        **data.options.as_arguments(),
    )
    if isinstance(module, PlannedDataModule):
        module.memory = memory or module.memory
        return module
    return HeldDataModule(
        module,
        rank=shard,
        steps=data.train_steps_per_epoch,
        skip_steps=skip_steps,
        has_val_rows=data.val_plan is not None and data.val_plan.rows(shard) > 0,
    )


def _module_class(data_module: str | type[DataModule] | None) -> type[DataModule]:
    if isinstance(data_module, type):
        return data_module
    if data_module != "arrow":
        try:
            from hvd_estimators.loading.readers.petastorm import PetastormDataModule
        except ImportError:
            # Even if it is installed, importing it can fail with today's PyArrow.
            if data_module is not None:
                raise
        else:
            return PetastormDataModule
    from hvd_estimators.loading.readers.arrow import ArrowDataModule

    return ArrowDataModule
