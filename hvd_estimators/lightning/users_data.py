"""A user's LightningDataModule instead of the readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, Trainer

__all__ = ["UsersDataOptions", "is_lightning_data", "open_lightning_data", "skip_batches"]


@dataclass(frozen=True)
class UsersDataOptions:
    """What only a LightningDataModule gets, each field as a keyword argument; crosses to the ranks.

    Attributes
    ----------
    num_reader_epochs : int or None
        Passes of its reader; None for passes without end.
    transformation_edit_fields : sequence or None
        Fields that the transformation makes or changes, as (name, dtype, shape).
    transformation_removed_fields : sequence of str or None
        Fields that are dropped after it.
    debug_data_loader : bool
        For the module's own use.
    train_async_data_loader_queue_size, val_async_data_loader_queue_size : int, float or None
        For the module's own use.
    """

    num_reader_epochs: int | None
    transformation_edit_fields: Sequence[Any] | None
    transformation_removed_fields: Sequence[str] | None
    debug_data_loader: bool
    train_async_data_loader_queue_size: Any
    val_async_data_loader_queue_size: Any


def is_lightning_data(data_module: Any) -> bool:
    """Return whether a data module is a class derived from LightningDataModule."""
    return isinstance(data_module, type) and is_lightning(data_module, "LightningDataModule")


def open_lightning_data(
    spec: TrainSpec, further: UsersDataOptions, rank: int, size: int
) -> LightningDataModule:
    """Make the user's data module, with the keyword arguments that ``horovod.spark`` gave it.

    ``train_dir`` and ``val_dir`` are URLs with a scheme, as Petastorm wants them. Runs on the
    worker.

    Parameters
    ----------
    spec : TrainSpec
        What the ranks are told; ``spec.data.data_module`` is the class.
    further : UsersDataOptions
        What it gets beside that.
    rank, size : int
        This rank, and the number of ranks.
    """
    data = spec.data
    options = data.options
    make: Any = data.data_module
    module: LightningDataModule = make(
        train_dir=spec.store.url(data.train_path),
        val_dir=None if data.val_path is None else spec.store.url(data.val_path),
        num_train_epochs=spec.epochs,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        shuffle=options.shuffle,
        transformation=options.transform_fn,
        inmemory_cache_all=options.inmemory_cache_all,
        cur_shard=rank,
        shard_count=size,
        schema_fields=[column.name for column in data.columns],
        storage_options=options.storage_options,
        steps_per_epoch_train=data.train_steps_per_epoch,
        steps_per_epoch_val=data.validation_steps_per_epoch,
        verbose=options.verbose,
        reader_pool_type=options.reader_pool_type,
        reader_worker_count=options.train_reader_worker_count,
        seed=data.random_seed,
        **vars(further),
    )
    return module


def skip_batches(trainer: Trainer, seed: Callable[[], None]) -> None:
    """Take batches from a loader, in an epoch that is gone on with, up to those that are left.

    Loaders that know their position (``state_dict``) are there already.

    Parameters
    ----------
    trainer : Trainer
        Its training loop is about to begin.
    seed : callable
        Sets the random numbers with which the epoch began; the order of rows may depend on them.
    """
    fit: Any = trainer.fit_loop
    if all(hasattr(loader, "load_state_dict") for loader in fit._combined_loader.flattened):
        return
    fetcher = fit._data_fetcher
    seed()
    if trainer.current_epoch:
        iter(fetcher)
    else:
        # The first epoch's iterator is made before there is an epoch.
        fetcher.fetched -= fit.epoch_loop.batch_progress.current.ready
    for _ in range(fit.epoch_loop.batch_progress.current.ready):
        next(fetcher)
