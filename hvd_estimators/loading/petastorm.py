"""Data module that reads planned row ranges with Petastorm's worker pools."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hvd_estimators.data.arrays import Columns, table_to_columns
from hvd_estimators.data.remote_reads import RangeFiles, RangeRead
from hvd_estimators.exceptions import ReaderError
from hvd_estimators.loading.interleave import InterleaveGroup, interleave, range_tables
from hvd_estimators.loading.readers import PlannedDataModule

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 deprecates.
    warnings.simplefilter("ignore", FutureWarning)
    from petastorm.cache import NullCache
    from petastorm.local_disk_cache import LocalDiskCache
    from petastorm.workers_pool import EmptyResultError, thread_pool
    from petastorm.workers_pool.worker_base import WorkerBase

# By default, idle threads wake every millisecond to check for a stop request. Each time, they take
# the GIL from the training thread.
thread_pool.IO_TIMEOUT_INTERVAL_S = 0.05


@dataclass(frozen=True)
class _Failure:
    """A worker's exception, sent in place of a table."""

    error: BaseException

    def as_error(self) -> BaseException:
        """Return the exception that the consumer raises."""
        if isinstance(self.error, StopIteration):
            # A StopIteration would look like the normal end of the iterator.
            error = ReaderError("A reader's worker raised StopIteration.")
            error.__cause__ = self.error
            return error
        return self.error


_FILE, _IS_LAST = b"hvd_estimators.file", b"hvd_estimators.is_last"


class PetastormDataModule(PlannedDataModule):
    """Data module on Petastorm: a worker pool reads row groups ahead of the training loop.

    Petastorm's own reader shards by whole row groups and chooses their order. This class gives
    Petastorm's worker pools the planned row ranges instead. So each row is read once, and the
    order depends only on the seed.

    Parameters
    ----------
    cache_type : {"null", "local-disk"}
        "local-disk" caches the rows in a local folder for later passes. The folder is deleted at
        the end.
    cache_location : str, optional
        Parent of that folder. Default: the system's temporary directory.
    cache_size_limit : int
        Approximate maximum size of the cache in bytes. The oldest entries are evicted first.
    **kwargs
        See `PlannedDataModule`.
    """

    short_name = "petastorm"

    def __init__(
        self,
        *,
        cache_type: str = "null",
        cache_location: str | None = None,
        cache_size_limit: int = 10 * 2**30,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._cached_tables: LocalDiskCache | None = None
        if cache_type == "local-disk":
            folder = tempfile.mkdtemp(prefix="hvd_estimators-", dir=cache_location)
            # Tables have various sizes, so there is no row size for checking the limit.
            self._cached_tables = LocalDiskCache(folder, cache_size_limit, 0)

    def __exit__(self, *exc_info: Any) -> None:
        """Stop all readers and delete the cache."""
        super().__exit__(*exc_info)
        if self._cached_tables is not None:
            self._cached_tables.cleanup()

    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges with a pool of Petastorm workers; see `PlannedDataModule.read`."""
        first = next(passes)
        if not first:
            return
        passes = itertools.chain([first], passes)
        with RangeFiles(self.store, self.columns, self.footers) as files:
            if self.reader_pool_type == "dummy":
                reads = _RangeReader(files, self._cached_tables or NullCache()).read
                groups = (group for of_pass in passes for group in of_pass)
                with contextlib.closing(interleave(groups, reads, 0)) as tables:
                    for table, file in tables:
                        yield table_to_columns(table, self.columns, file)
                return
            # Interleaved row groups are read by one worker, which has its own threads.
            interleaved = any(len(group) > 1 for group in first)
            if not interleaved:
                passes = ((group,) for of_pass in passes for group in of_pass)
            items = self._items(passes, files, workers if interleaved else 0)
            # The queue of each worker holds at least five tables.
            pool = thread_pool.ThreadPool(workers, results_queue_size=1)
            pool.start(_RangeWorker, self._cached_tables or NullCache())
            try:
                for table in _tables(pool, items, 1 if interleaved else workers + 2):
                    file = table.schema.metadata[_FILE].decode()
                    yield table_to_columns(table, self.columns, file)
            finally:
                pool.stop()
                pool.join()

    def _items(
        self, work: Iterator[Sequence[InterleaveGroup]], files: RangeFiles, threads: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the work items for the workers, which get some items ahead of the consumer."""
        # A worker with threads reads ahead by itself, and cached rows need not be fetched.
        announced = not threads and not self._cached_tables
        for groups in work:
            if announced:
                for read in itertools.chain.from_iterable(groups):
                    files.announce(read)
            yield {"files": files, "groups": groups, "threads": threads}


def _tables(
    pool: thread_pool.ThreadPool, items: Iterator[dict[str, Any]], in_flight: int
) -> Generator[pa.Table, None, None]:
    """Yield the tables of the items, in their order.

    When the last table of an item is available, a worker gets the next item. This limits the tables
    that wait for a slow consumer.

    Parameters
    ----------
    pool : ThreadPool
        A running pool, which returns tables in the order of the items.
    items : iterator of dict
        The work.
    in_flight : int
        Number of items that workers have at the same time.
    """
    for item in itertools.islice(items, in_flight):
        pool.ventilate(**item)
    while True:
        try:
            table = pool.get_results()
        except EmptyResultError:
            return
        if isinstance(table, _Failure):
            raise table.as_error()
        if table.schema.metadata[_IS_LAST] == b"1":
            for item in itertools.islice(items, 1):
                pool.ventilate(**item)
        yield table


class _RangeReader:
    """Read the tables of row ranges from files, or from a cache.

    Parameters
    ----------
    files : RangeFiles
        Opens the files.
    cache : petastorm.cache.CacheBase
        Holds tables of earlier passes.
    """

    def __init__(self, files: RangeFiles, cache: Any) -> None:
        self.files = files
        self._cache = cache

    def read(self, read: RangeRead) -> Generator[tuple[tuple[pa.Table, str], bool], None, None]:
        """Yield each table of a range with the file's path, and whether it ends a slice."""
        row_range = read.row_range
        tables = self._read_tables(read)
        with contextlib.closing(tables):
            position = 0

            def read_up_to(part: int) -> tuple[pa.Table, bool, bool]:
                nonlocal position
                skipped, position = part - position, part + 1
                return next(itertools.islice(tables, skipped, None))

            is_last = False
            for part in itertools.count():
                if is_last:
                    return
                where = (row_range.file, row_range.row_group, row_range.start, read.rows, part)
                fill = functools.partial(read_up_to, part)
                table, ends_slice, is_last = self._cache.get(" ".join(map(str, where)), fill)
                yield (table, row_range.file), ends_slice

    def _read_tables(self, read: RangeRead) -> Generator[tuple[pa.Table, bool, bool], None, None]:
        """Yield each table with flags for the end of a slice and of the range.

        The file is opened with the first table.
        """
        with self.files.open(read) as file:
            tables = range_tables(file, read, self.files.specs)
            table, ends_slice = next(tables)
            for following in tables:
                yield table, ends_slice, False
                table, ends_slice = following
            yield table, ends_slice, True


class _RangeWorker(WorkerBase):
    """Worker that reads row ranges as Arrow tables; its argument is the cache."""

    _reader: _RangeReader | None = None

    def process(self, **item: Any) -> None:
        try:
            self._process(**item)
        except thread_pool.WorkerTerminationRequested:
            raise
        except BaseException as error:
            # Petastorm loses the traceback and treats `queue.Empty` as missing work. It also waits
            # forever for a thread that raises anything but an `Exception`.
            self.publish_func(_Failure(error))

    def _process(self, files: RangeFiles, groups: Sequence[InterleaveGroup], threads: int) -> None:
        if self._reader is None:
            self._reader = _RangeReader(files, self.args)
        upcoming = iter(groups)
        if threads and isinstance(self.args, NullCache):
            upcoming = files.ahead(upcoming)
        tables = interleave(upcoming, self._reader.read, threads)
        with contextlib.closing(tables):
            table, path = next(tables)
            for following in itertools.chain(tables, [None]):
                metadata = {_FILE: path, _IS_LAST: str(int(following is None))}
                self.publish_func(table.replace_schema_metadata(metadata))
                if following is not None:
                    table, path = following
