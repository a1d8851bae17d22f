"""Readers of planned row ranges: order, shuffling, batching and caching."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from hvd_estimators.data.arrays import Array, Columns, num_rows
from hvd_estimators.data.footers import FooterCache
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.loading import shuffle
from hvd_estimators.loading.blocks import BufferPool, Rows
from hvd_estimators.loading.interleave import (
    PART_BYTES,
    InterleaveGroup,
    Prefetch,
    mixed,
    one_per_group,
)
from hvd_estimators.loading.plan import RowRange, ShardPlan, batch_sizes
from hvd_estimators.loading.shuffle import (
    Chunk,
    read_into_memory,
    shuffle_in_memory,
    stream_batches,
)
from hvd_estimators.loading.transform import RowFunction, Transformation, Transformed
from hvd_estimators.store.base import Store

__all__ = ["ChunkedDataModule", "DataModule", "PlannedDataModule"]

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


_CHUNKS_AHEAD = 2


_DRAWN_ROWS = 2**12


"""Rows that are held, and rows that are taken at a time to be transformed."""


class PlannedDataModule(ChunkedDataModule):
    """A data module that delivers exactly the rows of a `ShardPlan`.

    A subclass only reads: it turns row ranges into columns, in the order that it is given. Order,
    shuffling, batching, row transformation and caching are done here, once for all readers.

    Parameters
    ----------
    columns : sequence of ColumnSpec
        The columns to read.
    train_plan, val_plan : ShardPlan
        Which rank reads what; ``val_plan`` is None without validation.
    random_seed : int
        Together with rank and pass it determines the order of the rows.
    skip_train_steps : int
        Training batches that were taken before (a resumed run starts after them).
    reader_pool_type : {"thread", "process", "dummy"}
        How readers work in parallel.
    train_reader_worker_count, val_reader_worker_count : int
        Readers that work in parallel.
    transformation : Transformation, optional
        Applied to all rows that are read. Default: ``transform_fn``, where that is given.
    shuffle_buffer_size : int, optional
        Bytes of rows that are held for shuffling. Default: 128 MiB.
    store : Store, optional
        Opens the files. Default: made of ``train_dir`` and ``storage_options``.
    **kwargs
        See `DataModule`.

    Attributes
    ----------
    memory : BufferPool
        Where the batches' memory comes from; may be set until reading begins.
    """

    def __init__(
        self,
        *,
        columns: Sequence[ColumnSpec],
        train_plan: ShardPlan,
        val_plan: ShardPlan | None = None,
        random_seed: int = 0,
        skip_train_steps: int = 0,
        reader_pool_type: str = "thread",
        train_reader_worker_count: int = 2,
        val_reader_worker_count: int = 2,
        transformation: Transformation | None = None,
        shuffle_buffer_size: int | None = None,
        store: Store | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.store = store or Store.create(
            self.train_dir, storage_options=dict(self.storage_options or {})
        )
        self.footers = FooterCache(self.store)
        self.columns = columns
        self.train_plan = train_plan
        self.val_plan = val_plan
        self.random_seed = random_seed
        self.skip_train_steps = skip_train_steps
        self.reader_pool_type = reader_pool_type
        self.train_reader_worker_count = train_reader_worker_count
        self.val_reader_worker_count = val_reader_worker_count
        if transformation is None and self.transform_fn is not None:
            transformation = Transformation(self.transform_fn)
        self.transformation = transformation
        self.shuffle_buffer_bytes = shuffle_buffer_size or shuffle.SHUFFLE_BUFFER_BYTES
        self._cache: dict[RowRange, list[Columns]] = {}
        self.memory = BufferPool()
        self._open: set[Generator[Chunk, None, None] | Prefetch[Chunk]] = set()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop everything that is still reading."""
        for source in list(self._open):
            source.close()

    @abstractmethod
    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges, pass after pass, in the given order.

        Called in a thread of its own, unless the pool type is "dummy". It may read ahead, by a
        bounded number of bytes.

        Parameters
        ----------
        passes : iterator of sequence of InterleaveGroup
            What to read in each pass, bundle after bundle, and of each a slice of every range in
            turn (see `interleave`); may have no end, and is drawn from as reading goes on.
        workers : int
            How many readers may work in parallel.

        Yields
        ------
        dict
            The columns of one or more parts of each slice; no part has rows of two ranges.
        """

    def train_chunks(self) -> Iterator[Chunk]:
        """Return the training batches in chunks, pass after pass, each in its own order."""
        return self._ahead(self._train_chunks(), "training rows")

    def val_chunks(self) -> Iterator[Chunk]:
        """Return the validation batches of one pass in chunks, in stored order."""
        return self._ahead(self._val_chunks(), "validation rows")

    def _train_chunks(self) -> Generator[Chunk, None, None]:
        sizes = self.train_plan.batch_sizes(self.cur_shard, self.train_batch_size)
        first_pass, skip = divmod(self.skip_train_steps, len(sizes))
        held = self.shuffle and self.inmemory_cache_all
        with contextlib.closing(
            self._held_chunks(sizes, first_pass) if held else self._read_chunks(sizes, first_pass)
        ) as chunks:
            for chunk in chunks:
                skipped = min(skip, len(chunk.sizes))
                skip -= skipped
                if skipped < len(chunk.sizes):
                    yield chunk.skip(skipped) if skipped else chunk

    def _read_chunks(self, sizes: list[int], first_pass: int) -> Generator[Chunk, None, None]:
        """Return the training batches, read anew in each pass."""
        rngs = (
            self._rng(pass_number, "rows") if self.shuffle else None
            for pass_number in itertools.count(first_pass)
        )
        passes = self._train_passes(first_pass)
        with contextlib.closing(self._parts(passes, self.train_reader_worker_count)) as parts:
            yield from stream_batches(parts, sizes, rngs, self.memory, self.shuffle_buffer_bytes)

    def _held_chunks(self, sizes: list[int], first_pass: int) -> Generator[Chunk, None, None]:
        """Return the training batches, read once, and shuffled as a whole in each pass."""
        bundles = one_per_group(self.train_plan.shards[self.cur_shard])
        total = self.train_plan.rows(self.cur_shard)
        with contextlib.closing(
            self.read(iter([bundles]), self.train_reader_worker_count)
        ) as parts:
            rows = read_into_memory(parts, total, self.memory)
        rngs = (self._rng(number, "rows") for number in itertools.count(first_pass))
        if self.transformation is None:
            yield from shuffle_in_memory(rows, sizes, rngs, self.memory)
            return
        # Each pass is transformed anew, since transformations may be random.
        some = batch_sizes(total, -(-total // _DRAWN_ROWS), _DRAWN_ROWS)
        parts_drawn = (
            chunk.rows.columns() for chunk in shuffle_in_memory(rows, some, rngs, self.memory)
        )
        transformed = self._transformed(parts_drawn)
        yield from stream_batches(transformed, sizes, itertools.repeat(None), self.memory)

    def _val_chunks(self) -> Generator[Chunk, None, None]:
        if self.val_plan is None or not self.val_plan.rows(self.cur_shard):
            return
        ranges = self.val_plan.shards[self.cur_shard]
        sizes = self._val_sizes(self.val_plan)
        passes = iter([one_per_group(ranges)])
        with contextlib.closing(self._parts(passes, self.val_reader_worker_count)) as parts:
            yield from stream_batches(parts, sizes, memory=self.memory)

    def num_val_batches(self) -> int:
        """Return how many validation batches a pass has on this rank, up to the steps of one."""
        if self.val_plan is None:
            return 0
        return min(len(self._val_sizes(self.val_plan)), self.steps_per_epoch_val)

    def _val_sizes(self, plan: ShardPlan) -> list[int]:
        # The last steps of a short shard can be empty.
        return [size for size in plan.batch_sizes(self.cur_shard, self.val_batch_size) if size]

    def _ahead(self, chunks: Generator[Chunk, None, None], name: str) -> Iterator[Chunk]:
        """Make chunks in a thread of their own, while earlier ones are used."""
        in_this_thread = self.reader_pool_type == "dummy"
        source = (
            chunks if in_this_thread else Prefetch(chunks, _CHUNKS_AHEAD, f"hvd_estimators {name}")
        )
        self._open.add(source)
        try:
            yield from source
        finally:
            source.close()
            self._open.discard(source)

    def global_train_sizes(self) -> Iterator[int]:
        """Return the rows of each training step over all ranks, without end."""
        sizes = self.train_plan.global_batch_sizes(self.train_batch_size)
        step = self.skip_train_steps
        while True:
            yield sizes[step % len(sizes)]
            step += 1

    def _parts(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        read = self._read_cached if self.inmemory_cache_all else self.read
        with contextlib.closing(read(passes, workers)) as parts:
            yield from self._transformed(parts)

    def _transformed(self, parts: Iterable[Columns]) -> Iterator[Columns]:
        transformed = None if self.transformation is None else Transformed(self.transformation)
        for part in parts:
            if transformed is None:
                yield part
            else:
                yield from transformed.parts(part, PART_BYTES)

    def _read_cached(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read the ranges in stored order, each once."""
        for bundles in passes:
            ranges = [slices.row_range for bundle in bundles for slices in bundle]
            missing = [row_range for row_range in ranges if row_range not in self._cache]
            with contextlib.closing(self.read(iter([one_per_group(missing)]), workers)) as parts:
                for row_range in ranges:
                    if row_range not in self._cache:
                        self._cache[row_range] = list(_take_rows(parts, row_range.rows))
                        _make_read_only(self._cache[row_range])
                    yield from self._cache[row_range]

    def _train_passes(self, first_pass: int) -> Iterator[Sequence[InterleaveGroup]]:
        ranges = self.train_plan.shards[self.cur_shard]
        row_bytes = sum(spec.width * np.dtype(spec.dtype).itemsize for spec in self.columns)
        open_groups = self.train_plan.open_groups
        total = self.train_plan.rows(self.cur_shard)
        is_known = self.transformation is None and all(c.kind != "text" for c in self.columns)
        if is_known and total * row_bytes <= self.shuffle_buffer_bytes:
            open_groups = 1  # the buffer mixes all rows
        for pass_number in itertools.count(first_pass):
            if self.shuffle:
                rng = self._rng(pass_number, "row groups")
                yield mixed(ranges, open_groups, row_bytes, self.shuffle_buffer_bytes, rng)
            else:
                yield one_per_group(ranges)

    def _rng(self, pass_number: int, purpose: str) -> np.random.Generator:
        salt = {"row groups": 0, "rows": 1}[purpose]
        return np.random.default_rng([self.random_seed, self.cur_shard, pass_number, salt])


def _make_read_only(parts: Iterable[Columns]) -> None:
    """Keep a transformation, which may edit arrays, from editing these and not a copy."""
    for part in parts:
        for array in part.values():
            array.setflags(write=False)


def _take_rows(parts: Iterator[Columns], rows: int) -> Iterator[Columns]:
    """Yield parts until they have a number of rows."""
    while rows > 0:
        part = next(parts, None)
        if part is None:
            return
        rows -= num_rows(part)
        yield part
