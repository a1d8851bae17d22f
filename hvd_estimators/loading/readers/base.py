"""The reader interface: what a rank trains on, as batches of columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

from typing_extensions import Self

from hvd_estimators.loading.batching import Chunk
from hvd_estimators.loading.rows import Rows
from hvd_estimators.loading.transformation import RowFunction
from hvd_estimators.parquet.columns import Array, num_rows

__all__ = ["ChunkedDataModule", "DataModule"]

Batch = dict[str, Array]


class DataModule(ABC):
    """Gives a rank its batches. Runs on the worker; used as a context manager.

    Subclass it to feed training from elsewhere and pass the class as ``data_module``. It is made
    with keyword arguments only; take those you need and pass the rest on.

    Parameters
    ----------
    train_dir, val_dir : str
        Where the Parquet files lie; ``val_dir`` is None without validation.
    num_train_epochs : int
        Epochs that will be asked for.
    has_val : bool
        Whether `val_data` will be called.
    train_batch_size, val_batch_size : int
        Rows in a full batch of one rank.
    shuffle : bool
        Whether training rows come in random order.
    transform_fn : callable, optional
        Row (a dict of values) to row, applied to every row that is read.
    inmemory_cache_all : bool
        Keep the rank's rows in memory after the first pass.
    cur_shard, shard_count : int
        This rank and the number of ranks.
    schema_fields : sequence of str
        The columns that training needs.
    storage_options : dict, optional
        Passed to the store's fsspec filesystem.
    steps_per_epoch_train, steps_per_epoch_val : int
        Batches of one epoch.
    verbose : int
        0 is silent.
    **kwargs
        Whatever else the trainer knows; see `PlannedDataModule`.
    """

    short_name: ClassVar[str] = ""

    def __init__(
        self,
        *,
        train_dir: str,
        val_dir: str | None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: RowFunction | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: int = 1,
        **kwargs: Any,
    ) -> None:
        self.train_dir = train_dir
        self.val_dir = val_dir
        self.num_train_epochs = num_train_epochs
        self.has_val = has_val
        self.train_batch_size = train_batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.transform_fn = transform_fn
        self.inmemory_cache_all = inmemory_cache_all
        self.cur_shard = cur_shard
        self.shard_count = shard_count
        self.schema_fields = schema_fields
        self.storage_options = storage_options
        self.steps_per_epoch_train = steps_per_epoch_train
        self.steps_per_epoch_val = steps_per_epoch_val
        self.verbose = verbose

    def __enter__(self) -> Self:
        return self

    def __exit__(  # noqa: B027 - not every module holds something open
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release readers and threads; does nothing by default."""

    @abstractmethod
    def train_data(self) -> Iterator[Batch]:
        """Return training batches without end: column name to array of ``(rows, *shape)``.

        Where they end nevertheless, training ends with a `DataError`.
        """

    @abstractmethod
    def val_data(self) -> Iterator[Batch]:
        """Return the batches of one pass over this rank's validation rows, a new one each time."""

    def train_chunks(self) -> Iterator[Chunk]:
        """Return the training batches in chunks, for those who take several at a time."""
        return _single_chunks(self.train_data())

    def val_chunks(self) -> Iterator[Chunk]:
        """Return the validation batches of one pass in chunks."""
        return _single_chunks(self.val_data())

    def num_val_batches(self) -> int | None:
        """Return how many validation batches a pass has on this rank, if that is known beforehand.

        None (the default) if only a pass over the rows can answer.
        """
        return None

    def global_train_sizes(self) -> Iterator[int] | None:
        """Return the rows of each training step over all ranks, if they are known beforehand.

        None (the default) makes the trainer add the ranks' rows up in every step.
        """
        return None


class ChunkedDataModule(DataModule):
    """A data module that makes chunks; single batches are cut from these."""

    def train_data(self) -> Iterator[Batch]:
        """Return the batches of `train_chunks`, one by one."""
        return _batches(self.train_chunks())

    def val_data(self) -> Iterator[Batch]:
        """Return the batches of `val_chunks`, one by one."""
        return _batches(self.val_chunks())

    @abstractmethod
    def train_chunks(self) -> Iterator[Chunk]:
        """Return the training batches in chunks, without end."""

    @abstractmethod
    def val_chunks(self) -> Iterator[Chunk]:
        """Return the validation batches of one pass in chunks, anew each time."""


def _single_chunks(batches: Iterator[Batch]) -> Iterator[Chunk]:
    for batch in batches:
        yield Chunk(Rows.of(batch), (num_rows(batch),))


def _batches(chunks: Iterator[Chunk]) -> Iterator[Batch]:
    for chunk in chunks:
        yield from chunk.batches()
