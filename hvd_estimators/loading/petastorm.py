"""Data module that reads planned row ranges with Petastorm's worker pools."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

import cloudpickle
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
    from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer
    from petastorm.workers_pool import EmptyResultError, thread_pool
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.worker_base import WorkerBase

# By default, idle threads wake every millisecond to check for a stop request. Each time, they take
# the GIL from the training thread.
thread_pool.IO_TIMEOUT_INTERVAL_S = 0.05


_FINAL_MESSAGES_MS = 1000
"""Maximum wait for messages of a dead worker, in milliseconds."""

_LIVENESS_SECONDS = 1.0
"""Interval of liveness checks while workers send results."""

_START_SECONDS = 300
"""Start timeout of worker processes; Petastorm's own limit is 20 seconds."""

_FAILURE = b"hvd_estimators failure:"
"""Prefix of a serialized failure; an Arrow table cannot begin with it."""


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


class _WorkerTraceback(Exception):
    """Traceback from another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Serializer(ArrowTableSerializer):
    """Serializer for tables, as Arrow streams, and for failures with their tracebacks."""

    def serialize(self, rows: Any) -> Any:
        if not isinstance(rows, _Failure):
            return super().serialize(rows)
        error = rows.as_error()
        text = "".join(traceback.format_exception(error))
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        dumped = None
        # Pickle by reference only: classes of a script must not replace those of the rank.
        with contextlib.suppress(Exception):
            dumped = pickle.dumps(error)
        return _FAILURE + pickle.dumps((dumped, last, text))

    def deserialize(self, serialized_rows: Any) -> Any:
        if bytes(serialized_rows[: len(_FAILURE)]) != _FAILURE:
            return super().deserialize(serialized_rows)
        dumped, last, text = pickle.loads(serialized_rows[len(_FAILURE) :])
        error: BaseException | None = None
        # Unpickling fails for exceptions whose constructors take other arguments than the message.
        with contextlib.suppress(Exception):
            error = pickle.loads(dumped) if dumped is not None else None
        if not isinstance(error, BaseException):
            error = ReaderError(f"A worker process of the reader failed: {last}")
        error.__cause__ = _WorkerTraceback(text)
        return _Failure(error)


class _WatchedProcessPool(ProcessPool):
    """Petastorm's process pool, with an error if a worker dies; Petastorm would wait forever."""

    _results_receiver_poller: Any

    def _wait_for_workers_to_start(self) -> None:
        poller = _WatchfulPoller(self._results_receiver_poller, self._workers)
        self._results_receiver_poller = poller
        deadline = time.monotonic() + _START_SECONDS
        try:
            for _ in self._workers:
                while not (ready := poller.poll(_LIVENESS_SECONDS * 1000)):
                    if time.monotonic() > deadline:
                        raise ReaderError(
                            f"reader_pool_type: expected {len(self._workers)} worker processes to "
                            f"start within {_START_SECONDS} seconds, and not all did. Set fewer "
                            "train_reader_num_workers, or reader_pool_type='thread'."
                        )
                ready[0][0].recv_pyobj()
        except BaseException:
            for process in self._workers:
                process.kill()
            self.join()
            raise

    def ventilate(self, *args: Any, **kwargs: Any) -> None:
        # If no worker is left, Petastorm's own method retries for 20 seconds.
        self._results_receiver_poller.check()
        super().ventilate(*args, **kwargs)


class _WatchfulPoller:
    """Poller that also checks the worker processes, regularly and when no message arrives."""

    def __init__(self, poller: Any, processes: Sequence[Popen[bytes]]) -> None:
        self._poller = poller
        self._processes = processes
        self._next_check = 0.0

    def poll(self, timeout: float) -> Any:
        ready = self._poller.poll(timeout)
        if ready and time.monotonic() < self._next_check:
            return ready
        self._next_check = time.monotonic() + _LIVENESS_SECONDS
        return self.check(ready)

    def check(self, ready: Any = ()) -> Any:
        """Return the sockets with messages; raise an error if a worker died without a message."""
        # Workers run until they receive a stop request, and polling ends before that.
        dead = [process for process in self._processes if process.poll() is not None]
        if not dead:
            return ready
        # A worker that failed without a signal has sent an exception first. The exception always
        # arrives, because the other workers become idle: they receive no new work while a range is
        # missing.
        killed = any(process.returncode < 0 for process in dead)
        ready = [] if killed else ready or self._poller.poll(_FINAL_MESSAGES_MS)
        if ready:
            return ready
        workers = ", ".join(f"{process.pid} ({_end(process.returncode)})" for process in dead)
        raise ReaderError(
            f"reader_pool_type: expected {len(self._processes)} worker processes to read, but "
            f"process {workers} ended. If memory was short, set fewer train_reader_num_workers, or "
            "reader_pool_type='thread', which needs less."
        )


def _end(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_FILE, _PART, _NEXT = (b"hvd_estimators.%s" % name for name in (b"file", b"part", b"next"))


class PetastormDataModule(PlannedDataModule):
    """Data module on Petastorm: a worker pool reads row groups ahead of the training loop.

    Petastorm's own reader shards by whole row groups and chooses their order. This class gives
    Petastorm's worker pools the planned row ranges instead. Each row is thus read once, and the
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
        """Read row ranges with a pool of Petastorm workers; see `PlannedDataModule.read`.

        With ``reader_pool_type="dummy"``, the calling thread reads, without a pool.
        """
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
            pool = (
                _WatchedProcessPool(workers, _Serializer())
                if self.reader_pool_type == "process"
                # The queue of each worker holds at least five tables.
                else thread_pool.ThreadPool(workers, results_queue_size=1)
            )
            pool.start(_RangeWorker, self._cached_tables or NullCache())
            try:
                for table in _in_sequence(pool, items, 1 if interleaved else workers + 2):
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
        announced = self.reader_pool_type == "thread" and not threads and not self._cached_tables
        shared = _pickled(files) if self.reader_pool_type == "process" else files
        for sequence, groups in enumerate(work):
            ranges = [read for group in groups for read in group]
            if announced:
                for read in ranges:
                    files.announce(read)
            yield {
                "files": shared,
                # Worker processes are short-lived. This process reads each footer once and sends
                # it.
                "tails": files.tails(ranges) if self.reader_pool_type == "process" else {},
                "groups": groups,
                "threads": threads,
                "sequence": sequence,
            }


def _in_sequence(
    pool: Any, items: Iterator[dict[str, Any]], in_flight: int
) -> Generator[pa.Table, None, None]:
    """Yield tables in the order of the items; process pools answer in any order.

    When the last table of an item is available, a worker gets the next item. This limits the tables
    that wait here for a slow or dead worker.

    Parameters
    ----------
    pool : ThreadPool or ProcessPool
        A running pool.
    items : iterator of dict
        The work.
    in_flight : int
        Number of items that workers have at the same time.
    """
    early: dict[tuple[int, int], pa.Table] = {}
    position = (0, 0)
    for item in itertools.islice(items, in_flight):
        pool.ventilate(**item)
    while True:
        try:
            table = pool.get_results()
        except EmptyResultError:
            return
        if isinstance(table, _Failure):
            raise table.as_error()
        early[_numbers(table, _PART)] = table
        while (table := early.pop(position, None)) is not None:
            following = _numbers(table, _NEXT)
            if following[0] > position[0]:
                for item in itertools.islice(items, 1):
                    pool.ventilate(**item)
            yield table
            position = following


def _pickled(files: RangeFiles) -> bytes:
    """Serialize the store and columns of the files once for all ranges.

    Petastorm itself uses plain pickle, which supports neither lambdas nor classes of a script.

    Raises
    ------
    ReaderError
        If the store cannot be serialized.
    """
    try:
        return cloudpickle.dumps(files)
    except Exception as error:
        raise ReaderError(
            "reader_pool_type: 'process' sends the store to worker processes with cloudpickle, "
            f"which fails: {type(error).__name__}: {error}. Set reader_pool_type='thread', or "
            "let the store open what cannot be pickled when it is needed."
        ) from error


def _numbers(table: pa.Table, key: bytes) -> tuple[int, int]:
    sequence, part = table.schema.metadata[key].split()
    return int(sequence), int(part)


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

    def _process(
        self,
        files: RangeFiles | bytes,
        tails: Mapping[str, bytes],
        groups: Sequence[InterleaveGroup],
        threads: int,
        sequence: int,
    ) -> None:
        if self._reader is None:
            files = pickle.loads(files) if isinstance(files, bytes) else files
            self._reader = _RangeReader(files, self.args)
        self._reader.files.footers.add(tails)
        upcoming = iter(groups)
        if threads and isinstance(self.args, NullCache):
            upcoming = self._reader.files.ahead(upcoming)
        tables = interleave(upcoming, self._reader.read, threads)
        with contextlib.closing(tables):
            table, path = next(tables)
            for part, following in enumerate(itertools.chain(tables, [None])):
                after = (sequence + 1, 0) if following is None else (sequence, part + 1)
                metadata = {
                    _FILE: path,
                    _PART: f"{sequence} {part}",
                    _NEXT: f"{after[0]} {after[1]}",
                }
                self.publish_func(table.replace_schema_metadata(metadata))
                if following is not None:
                    table, path = following
