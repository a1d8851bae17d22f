"""Loaders of a rank's batches, and the user's own data module."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.lightning.package import flavor_of, is_lightning
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.collate_fn import map_leaves
from hvd_estimators.loading.readers import DataModule
from hvd_estimators.torch.collectives import exchange
from hvd_estimators.torch.loss_weights import StepBatches, rows_of
from hvd_estimators.torch.tensors import as_tensor, tensor_batches
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, Trainer

TensorBatch = Mapping[str, torch.Tensor] | CollatedBatch

_Window = Sequence[Sequence[TensorBatch]]
"""Batches among which rows weigh equally: each with a micro-batch for each of the rank's shards."""


def check_validation_batches(counts: Collection[int], mode: str) -> None:
    """Check that all ranks validate on as many batches, as they must if they share the module.

    Raises
    ------
    ParamError
        If they do not; ``mode`` is the value of ``sharding``.
    """
    if len(set(counts)) > 1:
        raise ParamError(
            f"val_batch_size: the processes validate on {min(counts)} to {max(counts)} batches, "
            f"and with sharding={mode!r} they compute together. Set a larger val_batch_size."
        )


def is_lightning_data(data_module: Any) -> bool:
    """Return whether a data module is a class derived from LightningDataModule."""
    return isinstance(data_module, type) and is_lightning(data_module, "LightningDataModule")


def open_lightning_data(
    spec: TrainSpec, further: Mapping[str, Any], rank: int, size: int
) -> LightningDataModule:
    """Create the user's data module with the keyword arguments of ``horovod.spark``.

    ``train_dir`` and ``val_dir`` are URLs with a scheme, as Petastorm requires. Runs in the rank.

    Parameters
    ----------
    spec : TrainSpec
        The rank's spec; ``spec.data.data_module`` is the class.
    further : mapping
        Further keyword arguments of the data module.
    rank, size : int
        This rank, and the number of ranks.
    """
    data = spec.data
    options = data.options
    store = options.store or spec.store
    make: Any = data.data_module
    module: LightningDataModule = make(
        train_dir=store.url(data.train_path),
        val_dir=None if data.val_path is None else store.url(data.val_path),
        num_train_epochs=spec.epochs,
        has_val=data.val_plan is not None,
        train_batch_size=data.batch_size,
        val_batch_size=data.val_batch_size,
        shuffle=options.shuffle,
        transformation=options.transform_fn,
        inmemory_cache_all=options.inmemory_cache_all,
        cur_shard=rank,
        shard_count=size,
        schema_fields=data.field_names,
        storage_options=options.storage_options,
        steps_per_epoch_train=data.train_steps_per_epoch,
        steps_per_epoch_val=data.validation_steps_per_epoch,
        verbose=options.verbose,
        reader_pool_type=options.reader_pool_type,
        reader_worker_count=options.train_reader_worker_count,
        seed=data.random_seed,
        **further,
    )
    return module


def skip_batches(trainer: Trainer, seed: Callable[[], None]) -> None:
    """Skip the completed batches of a resumed epoch.

    Loaders with a ``state_dict`` restore their position and need no skipping.

    Parameters
    ----------
    trainer : Trainer
        A Trainer that is about to run its training loop.
    seed : callable
        Sets the random numbers of the epoch's start, because the order of rows may depend on them.
    """
    fit: Any = trainer.fit_loop
    make: Any = flavor_of(trainer)
    loaders = make.get("utilities.CombinedLoader")(trainer.train_dataloader).flattened
    if all(hasattr(loader, "load_state_dict") for loader in loaders):
        return
    fetcher = fit._data_fetcher
    seed()
    if trainer.current_epoch:
        iter(fetcher)
    else:
        # Lightning creates the first epoch's iterator before the epoch starts.
        fetcher.fetched -= fit.epoch_loop.batch_progress.current.ready
    for _ in range(fit.epoch_loop.batch_progress.current.ready):
        next(fetcher)


@dataclass(frozen=True)
class BatchForm:
    """Conversion of a batch's columns to the tensors that a LightningModule gets.

    Attributes
    ----------
    dtypes : mapping
        Column name to the name of a torch dtype, if it differs from the stored one.
    shapes : mapping
        Column name to a shape whose first dimension stands for the rows.
    """

    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def apply(self, batch: TensorBatch) -> Any:
        """Return a batch in this form; the user's own batch of a collate function."""
        if isinstance(batch, CollatedBatch):
            value = map_leaves(as_tensor, batch.value)
            if not isinstance(value, dict):
                return value
            return {name: self._tensor(name, each) for name, each in value.items()}
        if not self.dtypes and not self.shapes:
            return batch
        return {name: self._tensor(name, tensor) for name, tensor in batch.items()}

    def _tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self.dtypes:
            tensor = tensor.to(getattr(torch, self.dtypes[name]))
        if name in self.shapes:
            tensor = tensor.reshape(len(tensor), *self.shapes[name][1:])
        return tensor


class _Loader:
    """Loader that provides the weight of its latest batch.

    Attributes
    ----------
    rows : int
        Rows of the latest batch.
    is_shared : bool
        Whether every rank runs this batch, so that its step may communicate.
    """

    def __init__(self, form: BatchForm, steps: int) -> None:
        self.rows = 0
        self.is_shared = True
        self._form = form
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def _give(self, batch: TensorBatch, is_shared: bool) -> Any:
        self.rows, self.is_shared = rows_of(batch), is_shared
        if not self.rows:
            raise DataError("data_module: a batch has no rows. Yield only batches with rows.")
        return self._form.apply(batch)


class TrainLoader(_Loader):
    """Training batches of all epochs.

    On a rank with several shards, a batch has a micro-batch for each. The loader yields the first
    one; `enter` returns the others.

    Parameters
    ----------
    batches : StepBatches
        The rank's batches.
    form : BatchForm
        The tensors that the module gets.
    steps : int
        Batches of an epoch.
    passes_per_step : callable
        Returns the number of batches of the next step.
    shards : ShardStates
        Switches to the shard of each micro-batch.
    limit : callable, optional
        Returns the number of batches after which the Trainer ends an epoch.
    done : int
        Batches of the first epoch that an earlier launch trained on; the loader skips them.

    Attributes
    ----------
    passes : int
        Number of batches in a step among which rows weigh equally.
    step_rows : float
        Rows of these batches on all ranks.
    """

    def __init__(
        self,
        batches: StepBatches,
        form: BatchForm,
        steps: int,
        passes_per_step: Callable[[], int],
        shards: ShardStates,
        done: int = 0,
        limit: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(form, steps)
        self._limit = limit
        self.passes, self.step_rows = 1, 1.0
        self._micro_batches: Sequence[TensorBatch] = ()
        self._done = done
        self._position = done
        self._batches = batches
        self._passes_per_step = passes_per_step
        self._shards = shards

    def __iter__(self) -> Iterator[Any]:
        index, self._done = self._done, 0
        # The Trainer may have stopped before the end of the epoch (limit_train_batches).
        while self._position != index:
            self._next_window(1)
        end = self._steps if self._limit is None else min(self._steps, int(self._limit()))
        while index < end:
            window = self._next_window(min(self._passes_per_step(), end - index))
            index += len(window)
            # Lightning divides each loss by the number of passes.
            self.passes = self._passes_per_step()
            for self._micro_batches in window:
                self._shards.begin_step()
                yield self.enter(0)

    def enter(self, index: int) -> Any:
        """Switch to one of the rank's shards, and return its part of the newest batch."""
        self._shards.enter(index)
        is_shared = index < self._shards.num_shards // self._shards.size
        return self._give(self._micro_batches[index], is_shared)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, which marks the loader as resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept the return value of `state_dict`."""

    def _next_window(self, count: int) -> _Window:
        parts, own = self._shards.passes, len(self._shards.shards)
        given, self.step_rows = self._batches.next_step(count * parts)
        self._position = (self._position + count) % self._steps
        # The batch of a shard that only other ranks have is empty.
        return [given[first : first + own] for first in range(0, len(given), parts)]


class ValidationLoader(_Loader):
    """One pass over the rank's validation rows.

    Parameters
    ----------
    data : DataModule
        Provides the batches.
    form : BatchForm
        The tensors that the module gets.
    steps : int
        Batches of a pass; at most these if the data module does not know its own number.
    device : torch.device or str
        The device of the batches.

    Attributes
    ----------
    counts : list of int
        Batches of each rank.
    """

    def __init__(
        self, data: DataModule, form: BatchForm, steps: int, device: torch.device | str = "cpu"
    ) -> None:
        known = data.num_val_batches()
        super().__init__(form, steps if known is None else known)
        self._data = data
        self._device = device
        self.counts = exchange.gather(len(self), "validation_batches")
        self._shared = min(self.counts)

    def __iter__(self) -> Iterator[Any]:
        with contextlib.closing(self._batches()) as batches:
            for index, batch in enumerate(itertools.islice(batches, self._steps)):
                yield self._give(batch, index < self._shared)

    def _batches(self) -> Generator[TensorBatch, None, None]:
        yield from tensor_batches(self._data.val_chunks(), self._device)
