"""Data module that reads planned row ranges with Petastorm's worker pools."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hvd_estimators.data.arrays import Columns, table_to_columns
from hvd_estimators.data.remote_reads import RangeFiles, RangeRead
from hvd_estimators.exceptions import ReaderError
from hvd_estimators.loading.interleave import InterleaveGroup, interleave, read_tables
from hvd_estimators.loading.readers import PlannedDataModule

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 deprecates.
    warnings.simplefilter("ignore", FutureWarning)
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
    """

    short_name = "petastorm"

    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges with a pool of Petastorm workers; see `PlannedDataModule.read`."""
        first = next(passes)
        if not first:
            return
        passes = itertools.chain([first], passes)
        with self.open_files() as files:
            # Interleaved row groups are read by one worker, which has its own threads.
            interleaved = any(len(group) > 1 for group in first)
            if not interleaved:
                passes = ((group,) for of_pass in passes for group in of_pass)
            threads = self.num_threads(workers)
            items = (
                {"files": files, "groups": groups, "threads": threads if interleaved else 0}
                for groups in passes
            )
            # The queue of each worker holds at least five tables.
            pool = thread_pool.ThreadPool(threads, results_queue_size=1)
            pool.start(_RangeWorker)
            try:
                for table in _tables(pool, items, 1 if interleaved else threads + 2):
                    file = table.schema.metadata[_FILE].decode()
                    yield table_to_columns(table, self.columns, file)
            finally:
                pool.stop()
                pool.join()


def _read(
    groups: Iterator[InterleaveGroup], files: RangeFiles, threads: int
) -> Generator[tuple[pa.Table, str], None, None]:
    """Yield the tables of groups, each with the file's path; without threads, one after another."""

    def read(each: RangeRead) -> Generator[tuple[tuple[pa.Table, str], bool], None, None]:
        for table, ends_slice in read_tables(files, each):
            yield (table, each.row_range.file), ends_slice

    if threads:
        return interleave(groups, read, threads)
    return (part for group in groups for each in group for part, _ in read(each))


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


class _RangeWorker(WorkerBase):
    """Worker that reads row ranges as Arrow tables."""

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
        with contextlib.closing(_read(iter(groups), files, threads)) as tables:
            table, path = next(tables)
            for following in itertools.chain(tables, [None]):
                metadata = {_FILE: path, _IS_LAST: str(int(following is None))}
                self.publish_func(table.replace_schema_metadata(metadata))
                if following is not None:
                    table, path = following
