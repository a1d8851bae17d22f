"""Data modules: the batches of a rank, from its row ranges or from a user's source.

`PlannedDataModule` implements order, shuffling, batching and caching. `ArrowDataModule` reads with
PyArrow only. `hvd_estimators.loading.petastorm` has the other reader, and `VirtualShards` joins the
readers of several shards.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from hvd_estimators.data.arrays import Array, Columns, num_rows, table_to_columns
from hvd_estimators.data.footers import FooterCache, is_whole
from hvd_estimators.data.inputs import InputColumns
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.range_cache import RangeCache
from hvd_estimators.data.remote_reads import READ_AHEAD, RangeFiles, RangeRead
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading import shuffle
from hvd_estimators.loading.blocks import BufferPool, Rows
from hvd_estimators.loading.collate import BoundedCollate, Collate, CollatedBatch
from hvd_estimators.loading.interleave import (
    PART_BYTES,
    InterleaveGroup,
    Prefetch,
    interleave,
    mixed,
    one_per_group,
    read_tables,
    together,
)
from hvd_estimators.loading.plan import BatchSizes, ShardPlan, micro_batches_per_step, vary
from hvd_estimators.loading.shuffle import (
    Batches,
    Chunk,
    batches_in_memory,
    read_into_memory,
    stream_batches,
)
from hvd_estimators.loading.transform import RowFunction, Transformation, Transformed
from hvd_estimators.loading.transform_pool import TransformPool
from hvd_estimators.store.base import Store

logger = logging.getLogger(__name__)

Batch = dict[str, Array]


class DataModule(ABC):
    """Base class of data modules, which provide a rank's batches. Runs on ranks.

    Use it as a context manager. To train on other data, define a subclass and pass it as
    ``data_module``. The constructor receives only keyword arguments. Use those that you need and
    pass the others to the base class.

    Parameters
    ----------
    train_dir, val_dir : str
        Paths of the Parquet files; ``val_dir`` is None without validation.
    num_train_epochs : int
        Number of epochs of the whole run.
    has_val : bool
        Whether `val_data` will be called.
    train_batch_size, val_batch_size : int
        Rows in a full batch of one rank.
    shuffle : bool
        Whether training rows are shuffled.
    transform_fn : callable, optional
        Maps a row (a dict of values) to a row. Applied to every row.
    inmemory_cache_all : bool
        Keep the rank's rows in memory after the first pass.
    cur_shard, shard_count : int
        This rank and the number of ranks.
    schema_fields : sequence of str
        The columns that training needs.
    storage_options : dict, optional
        Options for the store's fsspec filesystem.
    steps_per_epoch_train, steps_per_epoch_val : int
        Batches of one epoch.
    skip_train_steps : int
        Number of training batches that the run took before it resumed, since its first epoch.
    verbose : int
        0 disables output.
    **kwargs
        Further arguments of the trainer; see `PlannedDataModule`.

    Attributes
    ----------
    skips_train_steps : bool
        Whether `train_data` itself starts after ``skip_train_steps`` batches. If not, a resumed run
        reads these batches again, and discards them.
    """

    short_name: ClassVar[str] = ""
    skips_train_steps: ClassVar[bool] = False

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
        skip_train_steps: int = 0,
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
        self.skip_train_steps = skip_train_steps
        self.verbose = verbose

    def __enter__(self) -> Self:
        return self

    def __exit__(  # noqa: B027 - not every module holds something open
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release readers and threads. By default, this method does nothing."""

    @abstractmethod
    def train_data(self) -> Iterator[Batch]:
        """Return an infinite iterator of training batches, from the run's first one on.

        A resumed run discards the first of them, see ``skips_train_steps``. Each batch maps column
        names to arrays. Arrays have the shape ``(rows, *shape)``. If the iterator ends, training
        fails with a `DataError`.
        """

    @abstractmethod
    def val_data(self) -> Iterator[Batch]:
        """Return a new iterator over the batches of one pass over this rank's validation rows."""

    def train_chunks(self) -> Iterator[Batches]:
        """Return the training batches in chunks of several batches."""
        return _single_chunks(self.train_data())

    def val_chunks(self) -> Iterator[Batches]:
        """Return the validation batches of one pass in chunks."""
        return _single_chunks(self.val_data())

    def num_train_batches(self) -> int | None:
        """Return the number of training batches that the run will take, or None if unknown.

        Further batches are available, but a thread that reads ahead leaves them out. Default: None.
        """
        return None

    def num_val_batches(self) -> int | None:
        """Return the number of this rank's validation batches per pass, or None if unknown.

        Default: None, which means that only a pass over the rows can determine the number.
        """
        return None

    def global_train_sizes(self) -> Iterator[int] | None:
        """Return the number of rows in each training step over all ranks, or None if unknown.

        The first number belongs to the first batch of `train_data`. Default: None. The trainer then
        sums the ranks' rows in every step.
        """
        return None


class ChunkedDataModule(DataModule):
    """Data module that produces chunks and splits them into single batches."""

    def train_data(self) -> Iterator[Batch]:
        """Return the batches of `train_chunks`."""
        return _batches(self.train_chunks())

    def val_data(self) -> Iterator[Batch]:
        """Return the batches of `val_chunks`."""
        return _batches(self.val_chunks())


def _single_chunks(batches: Iterator[Batch]) -> Iterator[Chunk]:
    for batch in batches:
        yield Chunk(Rows.of(batch), (num_rows(batch),))


def _batches(chunks: Iterator[Batches]) -> Iterator[Batch]:
    for chunk in chunks:
        yield from [chunk.value] if isinstance(chunk, CollatedBatch) else chunk.batches()


_CHUNKS_AHEAD = 2

_DRAWN_ROWS = 2**12
"""Number of cached rows that are drawn and transformed at a time."""


class PlannedDataModule(ChunkedDataModule):
    """Data module that delivers exactly the rows of a `ShardPlan`.

    A subclass implements only `read`, which turns row ranges into columns in the given order. This
    class implements order, shuffling, batching, row transformation and caching.

    Parameters
    ----------
    columns : sequence of ColumnSpec
        The columns to read.
    train_plan, val_plan : ShardPlan
        Assignment of rows to shards; ``val_plan`` is None without validation.
    random_seed : int
        Determines the row order, together with the rank and the pass.
    total_train_steps : int, optional
        Number of training batches of the whole run, including skipped ones. Passes after them are
        read only on demand. Default: unknown, so that any pass is read ahead.
    reader_pool_type : {"thread", "process", "dummy"}
        Type of the worker pool. With "process", threads read and processes transform. With "dummy",
        a single thread reads.
    train_reader_worker_count, val_reader_worker_count : int
        Number of workers of the pool.
    transformation : Transformation, optional
        Applied to all rows. Default: ``transform_fn``, if given.
    collate : Collate or BoundedCollate, optional
        Makes batches of rows; ``columns`` are then the column `ROWS` alone.
    shuffle_buffer_size : int, optional
        Size of the shuffle buffer in bytes. Default: 128 MiB.
    store : Store, optional
        Opens the files. Default: a store created from ``train_dir`` and ``storage_options``.
    local_cache_dir : str, optional
        Local folder that caches what is read of a remote store. Default: no cache.
    local_cache_size : int
        Approximate maximum size of the cache, in bytes.
    **kwargs
        See `DataModule`.

    Attributes
    ----------
    memory : BufferPool
        Allocates the batches. May be replaced before reading starts.
    """

    skips_train_steps = True

    def __init__(
        self,
        *,
        columns: Sequence[ColumnSpec],
        train_plan: ShardPlan,
        val_plan: ShardPlan | None = None,
        random_seed: int = 0,
        total_train_steps: int | None = None,
        reader_pool_type: str = "thread",
        train_reader_worker_count: int = 2,
        val_reader_worker_count: int = 2,
        transformation: Transformation | None = None,
        collate: BoundedCollate | Collate | None = None,
        shuffle_buffer_size: int | None = None,
        store: Store | None = None,
        local_cache_dir: str | None = None,
        local_cache_size: int = 10 * 2**30,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.store = store or Store.create(
            self.train_dir, storage_options=dict(self.storage_options or {})
        )
        self.footers = FooterCache(self.store)
        self._range_cache = (
            RangeCache(local_cache_dir, local_cache_size, self.store) if local_cache_dir else None
        )
        self.columns = columns
        self.train_plan = train_plan
        self.val_plan = val_plan
        self.random_seed = random_seed
        self.total_train_steps = total_train_steps
        self.reader_pool_type = reader_pool_type
        self.train_reader_worker_count = train_reader_worker_count
        self.val_reader_worker_count = val_reader_worker_count
        if transformation is None and self.transform_fn is not None:
            transformation = Transformation(self.transform_fn)
        self.transformation = transformation
        self.collate = collate
        self.shuffle_buffer_bytes = shuffle_buffer_size or shuffle.SHUFFLE_BUFFER_BYTES
        self._in_memory: dict[int, Rows] = {}
        self.memory = BufferPool()
        self._lock = threading.Lock()
        self._open: set[Prefetch[Batches]] = set()
        self._idle_pools: dict[int, list[TransformPool]] = {}
        self._is_closed = False

    def __exit__(self, *exc_info: Any) -> None:
        """Stop all readers, also those that other threads use. None can start any more."""
        with self._lock:
            self._is_closed = True
            sources = list(self._open)
        for source in sources:
            source.close()
        for pools in self._idle_pools.values():
            for pool in pools:
                pool.close()

    @abstractmethod
    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges, pass after pass, in the given order.

        This method is called in a separate thread. It may read a bounded number of bytes ahead.

        Parameters
        ----------
        passes : iterator of sequence of InterleaveGroup
            Groups of ranges to read in each pass. The ranges of a group are interleaved (see
            `interleave`). May be infinite; consumed lazily.
        workers : int
            Maximum number of parallel readers.

        Yields
        ------
        dict
            Columns of one or more tables of each slice.
        """

    def open_files(self) -> RangeFiles:
        """Return a context manager that opens the files for `read`."""
        return RangeFiles(self.store, self.columns, self.footers, self._range_cache)

    def num_threads(self, workers: int) -> int:
        """Return the number of threads that read: more for remote files, whose requests wait."""
        if self.reader_pool_type == "dummy":
            return 1
        is_local = self.store.local_path(self.train_dir) is not None
        return workers if is_local else workers + READ_AHEAD

    def train_chunks(self) -> Iterator[Batches]:
        """Return the training batches in chunks, pass after pass, each in its own order."""
        start, total = self.skip_train_steps, self.total_train_steps
        if total is None or self.inmemory_cache_all:
            yield from self._ahead(self._train_chunks(start), "training rows")
            return
        # Reading ahead ends with the run's last pass.
        per_pass = self.train_plan.steps(self.train_batch_size)
        passes = max(-(-total // per_pass), start // per_pass + 1)
        yield from self._ahead(self._train_chunks(start, passes), "training rows")
        yield from self._ahead(self._train_chunks(passes * per_pass), "further training rows")

    def val_chunks(self) -> Iterator[Batches]:
        """Return the validation batches of one pass in chunks, in stored order."""
        return self._ahead(self._val_chunks(), "validation rows")

    def _train_chunks(
        self, start: int, stop_pass: int | None = None
    ) -> Generator[Batches, None, None]:
        """Yield training chunks from step ``start`` of the run on, up to but without ``stop_pass``.

        None never ends.
        """
        plan, workers = self.train_plan, self.train_reader_worker_count
        sizes = plan.batch_sizes([self.cur_shard], self.train_batch_size)
        first, skip = divmod(start, len(sizes))
        passes = self._train_passes(_numbers(first, stop_pass))
        rngs = (
            self._rng(number, "rows") if self.shuffle else None
            for number in _numbers(first, stop_pass)
        )
        with contextlib.ExitStack() as stack:
            first_row = first * plan.rows(self.cur_shard)
            chunks = self._chunks(stack, plan, passes, sizes, rngs, workers, first_row)
            first_row = first * sizes.total + sizes.before(skip)
            yield from self._collated(stack, _without_first(chunks, skip), workers, first_row)

    def _val_chunks(self) -> Generator[Batches, None, None]:
        plan, workers = self.val_plan, self.val_reader_worker_count
        if plan is None or not plan.rows(self.cur_shard):
            return
        passes = iter([one_per_group(plan.shards[self.cur_shard])])
        with contextlib.ExitStack() as stack:
            chunks = self._chunks(stack, plan, passes, self._val_sizes(plan), [None], workers, 0)
            yield from self._collated(stack, chunks, workers, 0)

    def _chunks(
        self,
        stack: contextlib.ExitStack,
        plan: ShardPlan,
        passes: Iterator[Sequence[InterleaveGroup]],
        sizes: BatchSizes,
        rngs: Iterable[np.random.Generator | None],
        workers: int,
        first_row: int,
    ) -> Iterator[Chunk]:
        """Read, transform, shuffle and batch rows; ``stack`` closes the stages, the last one first.

        Parameters
        ----------
        stack : contextlib.ExitStack
            Context of the stages.
        plan : ShardPlan
            Plan of all rows of a pass.
        passes : iterator of sequence of InterleaveGroup
            The ranges of each pass. Not used if rows are kept in memory.
        sizes : BatchSizes
            Rows of each batch of a pass.
        rngs : iterable of numpy.random.Generator or None
            See `stream_batches`.
        workers : int
            Number of workers.
        first_row : int
            Number of rows of the run before the first pass.
        """
        varying_bytes = plan.varying_bytes_of(self.columns)
        if not self.inmemory_cache_all:
            parts = stack.enter_context(contextlib.closing(self.read(passes, workers)))
        else:
            rows = self._rows_in_memory(plan, workers)
            if self.transformation is None:
                return batches_in_memory(rows, sizes, rngs, self.memory, varying_bytes)
            # Transform the rows in each pass, because transformations may be random.
            some = BatchSizes([len(rows)], -(-len(rows) // _DRAWN_ROWS), _DRAWN_ROWS)
            rngs, of_passes = itertools.tee(rngs)
            drawn = batches_in_memory(rows, some, of_passes, self.memory, varying_bytes)
            parts = (chunk.rows.columns() for chunk in drawn)
            rngs = (None for _ in rngs)
        transformed = self._transformed(stack, parts, workers, first_row)
        return stream_batches(
            transformed, sizes, rngs, self.memory, self.shuffle_buffer_bytes, varying_bytes
        )

    def _rows_in_memory(self, plan: ShardPlan, workers: int) -> Rows:
        """Return all rows of this shard; read them once."""
        if id(plan) not in self._in_memory:
            passes = iter([one_per_group(plan.shards[self.cur_shard])])
            with contextlib.closing(self.read(passes, workers)) as parts:
                rows = read_into_memory(parts, plan.rows(self.cur_shard), self.memory)
            self._in_memory[id(plan)] = rows
        return self._in_memory[id(plan)]

    def num_train_batches(self) -> int | None:
        """Return the number of training batches that are left of the run, or None if unknown."""
        total = self.total_train_steps
        return None if total is None else max(total - self.skip_train_steps, 0)

    def num_val_batches(self) -> int:
        """Return this rank's validation batches per pass, at most the steps per epoch."""
        if self.val_plan is None:
            return 0
        return min(len(self._val_sizes(self.val_plan)), self.steps_per_epoch_val)

    def _val_sizes(self, plan: ShardPlan) -> BatchSizes:
        batches = plan.batches(self.cur_shard, self.val_batch_size)
        return BatchSizes([plan.rows(self.cur_shard)], batches, self.val_batch_size)

    def _ahead(self, chunks: Generator[Batches, None, None], name: str) -> Iterator[Batches]:
        """Produce chunks in a separate thread while earlier ones are used."""
        with self._lock:
            if self._is_closed:
                return
            source = Prefetch(chunks, _CHUNKS_AHEAD, f"hvd_estimators {name}")
            self._open.add(source)
        try:
            yield from source
        finally:
            source.close()
            with self._lock:
                self._open.discard(source)

    def global_train_sizes(self) -> Iterator[int]:
        """Return an infinite iterator of the rows in each training step, over all ranks."""
        sizes = self.train_plan.global_batch_sizes(self.train_batch_size)
        step = self.skip_train_steps
        while True:
            yield sizes[step % len(sizes)]
            step += 1

    def _transformed(
        self, stack: contextlib.ExitStack, parts: Iterator[Columns], workers: int, first_row: int
    ) -> Iterable[Columns]:
        """Return transformed parts; see `_chunks`."""
        if self.transformation is None:
            return parts
        transformed = Transformed(self.transformation)
        if self.reader_pool_type != "process":
            return itertools.chain.from_iterable(
                transformed.parts(part, PART_BYTES) for part in parts
            )
        seed = [self.random_seed, self.cur_shard]
        pool = stack.enter_context(self._pool(self.transformation, workers))
        results = pool.transform(parts, transformed, seed, first_row)
        return stack.enter_context(contextlib.closing(results))

    def _collated(
        self, stack: contextlib.ExitStack, chunks: Iterator[Chunk], workers: int, first_row: int
    ) -> Iterable[Batches]:
        """Return batches of rows, made by the user's function if there is one; see `_chunks`."""
        if self.collate is None:
            return chunks
        batches: Iterator[Any] = (columns[ROWS] for chunk in chunks for columns in chunk.batches())
        if self.reader_pool_type != "process":
            return map(self.collate, batches)

        def pieces() -> Iterator[tuple[RowTable, list[int]]]:
            position = first_row
            for rows in batches:
                yield rows, [self.random_seed, self.cur_shard, position]
                position += len(rows)

        pool = stack.enter_context(self._pool(self.collate, workers))
        return stack.enter_context(contextlib.closing(pool.map(pieces())))

    @contextlib.contextmanager
    def _pool(self, function: Any, workers: int) -> Iterator[TransformPool]:
        """Yield a pool of processes that call a function."""
        with self._lock:
            idle = self._idle_pools.setdefault(workers, [])
            pool = idle.pop() if idle else None
        # Processes stay for later passes, because starting them takes time.
        pool = pool or TransformPool(function, workers)
        try:
            yield pool
        except Exception:
            pool.close()
            raise
        finally:
            if not pool.is_closed:
                with self._lock:
                    idle.append(pool)

    def _train_passes(self, numbers: Iterable[int]) -> Iterator[Sequence[InterleaveGroup]]:
        ranges = self.train_plan.shards[self.cur_shard]
        row_bytes = self.train_plan.row_bytes_of(self.columns)
        open_groups = self.train_plan.open_groups
        total = self.train_plan.rows(self.cur_shard)
        is_known = self.transformation is None and not vary(self.columns)
        if is_known and total * row_bytes <= self.shuffle_buffer_bytes:
            open_groups = 1  # the buffer mixes all rows
        for pass_number in numbers:
            if self.shuffle:
                rng = self._rng(pass_number, "row groups")
                yield mixed(ranges, open_groups, row_bytes, self.shuffle_buffer_bytes, rng)
            else:
                yield one_per_group(ranges)

    def _rng(self, pass_number: int, purpose: str) -> np.random.Generator:
        salt = {"row groups": 0, "rows": 1}[purpose]
        return np.random.default_rng([self.random_seed, self.cur_shard, pass_number, salt])


def _numbers(first: int, stop: int | None) -> Iterable[int]:
    return itertools.count(first) if stop is None else range(first, stop)


def _without_first(chunks: Iterator[Chunk], batches: int) -> Iterator[Chunk]:
    """Yield chunks without the first batches."""
    for chunk in chunks:
        skipped = min(batches, len(chunk.sizes))
        batches -= skipped
        if skipped < len(chunk.sizes):
            yield chunk.skip(skipped) if skipped else chunk


class ArrowDataModule(PlannedDataModule):
    """Data module that reads row groups with PyArrow in threads, which decode without the GIL.

    Each worker holds at most one unconsumed table of a row group (see `range_tables`).
    """

    short_name = "arrow"

    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges in threads; see `PlannedDataModule.read`."""

        def read_range(each: RangeRead) -> Iterator[tuple[Columns, bool]]:
            for table, ends_slice in read_tables(files, each):
                yield table_to_columns(table, self.columns, each.row_range.file), ends_slice

        def read(ranges: Sequence[RangeRead]) -> Generator[tuple[list[Columns], bool], None, None]:
            if len(ranges) > 1:
                are_whole = [is_whole(files.tail(each.row_range.file)) for each in ranges]
                # Small files need Python's interpreter more than a processor. Others are fetched
                # while they are read, which must not wait for other threads.
                with decoding if all(are_whole) else contextlib.nullcontext():
                    parts = [part for each in ranges for part, _ in read_range(each)]
                yield parts, True
                return
            for part, ends_slice in read_range(ranges[0]):
                yield [part], ends_slice

        decoding = threading.Lock()
        threads = self.num_threads(workers)
        row_bytes = self.train_plan.row_bytes_of(self.columns)
        groups = (group for of_pass in passes for group in together(of_pass, row_bytes, threads))
        with (
            self.open_files() as files,
            contextlib.closing(interleave(groups, read, threads)) as read_together,
        ):
            for parts in read_together:
                yield from parts


class CheckedDataModule(ChunkedDataModule):
    """Wrap a user's data module: skip batches, stack matrices, and reject one that ends too early.

    Otherwise, training would continue without rows or wait for the other ranks, and the mean over
    no rows would be nan.

    Parameters
    ----------
    module : DataModule
        The user's data module.
    rank : int
        This rank.
    steps : int
        Training batches of an epoch on each rank.
    skip_steps : int
        Training batches of an earlier part of the run. They are discarded, unless the module skips
        them itself.
    has_val_rows : bool
        Whether the rank has validation rows.
    inputs : InputColumns
        The model's inputs. The user's batches may have the columns of matrices, or the matrices.
    """

    def __init__(
        self,
        module: DataModule,
        *,
        rank: int,
        steps: int,
        skip_steps: int,
        has_val_rows: bool,
        inputs: InputColumns,
    ) -> None:
        self.module = module
        self._inputs = inputs
        self._rank = rank
        self._steps = steps
        self._skip_steps = skip_steps
        self._discarded = 0 if module.skips_train_steps else skip_steps
        self._has_val_rows = has_val_rows
        self._val_batches = 0

    def __enter__(self) -> Self:
        self.module.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Exit the user's data module."""
        self.module.__exit__(*exc_info)

    def train_chunks(self) -> Iterator[Batches]:
        """Return the training batches in chunks; raise `DataError` if they end."""
        delivered = 0

        def counted() -> Iterator[Any]:
            nonlocal delivered
            for chunk in self.module.train_chunks():
                delivered += len(chunk.sizes)
                yield chunk

        if self._discarded and self._rank == 0:
            logger.info(
                "data_module: the run resumes after %d batches, which %s yields again and are "
                "discarded; see skips_train_steps",
                self._discarded,
                self._name,
            )
        yield from map(self._stacked, _without_first(counted(), self._discarded))
        position = self._skip_steps - self._discarded + delivered
        epoch, of_epoch = divmod(position, self._steps)
        raise DataError(
            f"Rank {self._rank}, epoch {epoch} (the first is 0): {self._name}.train_data() ended "
            f"after {of_epoch} of {self._steps} batches ({delivered} in all). Let it yield batches "
            "without end, pass after pass, or set train_steps_per_epoch to the batches that every "
            "rank has."
        )

    def val_chunks(self) -> Iterator[Batches]:
        """Return the validation batches of one pass; raise `DataError` if there are too few."""
        delivered = 0
        for chunk in self.module.val_chunks():
            delivered += len(chunk.sizes)
            yield self._stacked(chunk)
        expected = max(self._val_batches, int(self._has_val_rows))
        if delivered < expected:
            raise DataError(
                f"Rank {self._rank}: {self._name}.val_data() ended after {delivered} batches; "
                f"expected {expected} at least"
                f"{', as in the passes before' if self._val_batches else ''}. Return a new "
                "iterator over the validation rows each time."
            )
        self._val_batches = delivered

    def global_train_sizes(self) -> Iterator[int] | None:
        """Return the sizes that the user's data module reports."""
        sizes = self.module.global_train_sizes()
        return None if sizes is None else itertools.islice(sizes, self._discarded, None)

    def _stacked(self, chunk: Batches) -> Batches:
        if isinstance(chunk, CollatedBatch) or self._inputs.matrices.keys() <= set(
            chunk.rows.layout.names
        ):
            return chunk
        return Chunk(Rows.of(self._inputs.stack(chunk.rows.columns())), chunk.sizes)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


class VirtualShards(ChunkedDataModule):
    """Batches of a rank that runs several virtual shards, one after another in each step.

    A rank with one shard fewer than others gets an empty micro-batch in each step, so that all
    ranks have the same number of micro-batches. Each shard has its own reader. Its row order is
    therefore the same as on its own rank.

    Parameters
    ----------
    modules : sequence of PlannedDataModule
        One reader per shard of the rank.
    size : int
        Number of ranks.
    """

    def __init__(self, modules: Sequence[PlannedDataModule], size: int) -> None:
        self.modules = modules
        self._size = size
        self._num_shards = modules[0].train_plan.num_shards
        self._passes = micro_batches_per_step(self._num_shards, size)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for module in self.modules:
            self._opened.enter_context(module)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        """Close all readers."""
        self._opened.__exit__(*exc_info)

    def train_chunks(self) -> Generator[Batches, None, None]:
        """Return the training batches, each in its own chunk."""
        idle = self._passes - len(self.modules)
        with contextlib.ExitStack() as stack:
            shards = [
                stack.enter_context(contextlib.closing(_one_by_one(module.train_chunks())))
                for module in self.modules
            ]
            for chunks in zip(*shards, strict=True):
                yield from chunks
                for _ in range(idle):
                    yield _without_rows(chunks[0])

    def val_chunks(self) -> Generator[Batches, None, None]:
        """Return the validation batches of one pass, shard after shard, without empty ones."""
        for module in self.modules:
            with contextlib.closing(_one_by_one(module.val_chunks())) as chunks:
                yield from itertools.islice(chunks, module.steps_per_epoch_val)

    def num_train_batches(self) -> int | None:
        """Return the number of micro-batches that are left of the run, or None if unknown."""
        steps = self.modules[0].num_train_batches()
        return None if steps is None else steps * self._passes

    def num_val_batches(self) -> int:
        """Return the number of validation batches in a pass over all shards."""
        return sum(module.num_val_batches() for module in self.modules)

    def global_train_sizes(self) -> Iterator[int]:
        """Return an infinite iterator of the number of rows in each batch over all ranks."""
        first = self.modules[0]
        sizes = [
            first.train_plan.batch_sizes(
                range(start, min(start + self._size, self._num_shards)), first.train_batch_size
            )
            for start in range(0, self._num_shards, self._size)
        ]
        for step in itertools.count(first.skip_train_steps):
            yield from (of_pass[step % len(of_pass)] for of_pass in sizes)


def _without_rows(chunk: Batches) -> Batches:
    if isinstance(chunk, CollatedBatch):
        return CollatedBatch(0)
    return Chunk(chunk.rows.slice(0, 0), (0,))


def _one_by_one(chunks: Iterator[Batches]) -> Generator[Batches, None, None]:
    """Yield each batch as a chunk."""
    for chunk in chunks:
        if isinstance(chunk, CollatedBatch):
            yield chunk
            continue
        start = 0
        for size in chunk.sizes:
            yield Chunk(chunk.rows.slice(start, start + size), (size,))
            start += size
