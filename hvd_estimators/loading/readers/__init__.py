"""Readers: row ranges of Parquet files to batches of columns."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.loading.readers.base import DataModule, PlannedDataModule
from hvd_estimators.loading.readers.delivery import HeldDataModule
from hvd_estimators.remedies import INSTALL

if TYPE_CHECKING:
    from hvd_estimators.loading.spec import DataSpec

__all__ = ["DataModule", "check_data_module", "open_data_module"]


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


def open_data_module(
    data: DataSpec, rank: int, size: int, skip_steps: int, epochs: int
) -> DataModule:
    """Make a rank's data module. Runs on the worker.

    Parameters
    ----------
    data : DataSpec
        The data of the job.
    rank, size : int
        This rank and the number of ranks.
    skip_steps : int
        Training batches that were taken in an earlier part of the run.
    epochs : int
        Epochs that are left.

    Returns
    -------
    DataModule
        One that raises `DataError` if a user's module delivers too little.
    """
    module = _module_class(data.data_module)(
        train_dir=data.train_path,
        val_dir=data.val_path,
        num_train_epochs=epochs,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        cur_shard=rank,
        shard_count=size,
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
        return module
    return HeldDataModule(
        module,
        rank=rank,
        steps=data.train_steps_per_epoch,
        skip_steps=skip_steps,
        has_val_rows=data.val_plan is not None and data.val_plan.rows(rank) > 0,
    )


def _module_class(data_module: str | type[DataModule] | None) -> type[DataModule]:
    if isinstance(data_module, type):
        return data_module
    if data_module != "arrow":
        try:
            from hvd_estimators.loading.readers.petastorm import PetastormDataModule
        except ImportError:
            # Installed, it may still not import beside today's PyArrow.
            if data_module is not None:
                raise
        else:
            return PetastormDataModule
    from hvd_estimators.loading.readers.arrow import ArrowDataModule

    return ArrowDataModule
