"""Data module that reads planned row ranges with Petastorm's readers and worker pools."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import Popen
from types import TracebackType
from typing import Any

import cloudpickle
import pyarrow as pa
import zmq
from pyarrow import parquet

from hvd_estimators.data.arrays import Columns, table_to_columns
from hvd_estimators.data.remote_reads import RangeFiles, RangeRead
from hvd_estimators.exceptions import ReaderError
from hvd_estimators.loading.interleave import InterleaveGroup, interleave, range_tables
from hvd_estimators.loading.readers import PlannedDataModule

__all__ = ["PetastormDataModule"]

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 deprecates.
    warnings.simplefilter("ignore", FutureWarning)
    from petastorm.arrow_reader_worker import ArrowReaderWorker
    from petastorm.cache import NullCache
    from petastorm.fs_utils import FilesystemResolver
    from petastorm.local_disk_cache import LocalDiskCache
    from petastorm.reader import Reader
    from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.thread_pool import ThreadPool, WorkerTerminationRequested
    from petastorm.workers_pool.ventilator import Ventilator


_FINAL_MESSAGES_MS = 1000
"""Maximum wait for messages of a dead worker, in milliseconds."""


_LIVENESS_SECONDS = 1.0
"""Interval of liveness checks while workers send results."""


_RETRY_SECONDS = 0.05
"""Delay before work is offered again if all workers are busy."""


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


class SleepingThreadPool(ThreadPool):
    """Petastorm's thread pool, with threads that block while they are idle.

    Petastorm's own threads wake up every millisecond to check for a stop request. Each time, they
    take the GIL from the training thread.
    """

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        super().start(worker_class, worker_args)
        self._ventilator_queues = [_WorkQueue() for _ in self._workers]
        for worker, work in zip(self._workers, self._ventilator_queues, strict=True):
            worker._ventilator_queue = work
        self._ventilator = ventilator
        ventilator.start()

    def stop(self) -> None:
        super().stop()
        for work, results in zip(self._ventilator_queues, self._results_queues, strict=True):
            work.put(None)
            # A worker may be blocked on a full queue.
            with contextlib.suppress(queue.Empty):
                while True:
                    results.get_nowait()

    def _stop_aware_put(self, worker_id: int, data: Any) -> None:
        if self._stop_event.is_set():
            raise WorkerTerminationRequested
        self._results_queues[worker_id].put(data)


class _WorkQueue(queue.SimpleQueue[Any]):
    """Work queue of one worker; None makes the worker check for a stop request."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get()
        if item is None:
            raise queue.Empty
        return item


class WatchedProcessPool(ProcessPool):
    """Petastorm's process pool, with an error if a worker dies; Petastorm would wait forever."""

    _results_receiver_poller: Any
    _stopping = False

    def _wait_for_workers_to_start(self) -> None:
        poller = _WatchfulPoller(self._results_receiver_poller, self._workers)
        self._results_receiver_poller = poller
        deadline = time.monotonic() + _START_SECONDS
        try:
            for _ in self._workers:
                while not poller.poll(_LIVENESS_SECONDS * 1000):
                    if time.monotonic() > deadline:
                        raise ReaderError(
                            f"reader_pool_type: expected {len(self._workers)} worker processes to "
                            f"start within {_START_SECONDS} seconds, and not all did. Set fewer "
                            "train_reader_num_workers, or reader_pool_type='thread'."
                        )
                self._results_receiver.recv_pyobj()
        except BaseException:
            for process in self._workers:
                process.kill()
                process.wait()
            self._context.destroy(linger=0)
            raise

    def ventilate(self, *args: Any, **kwargs: Any) -> None:
        # Petastorm's own method retries for 20 seconds if no worker is left.
        self._ventilated_items += 1
        try:
            while not self._stopping:
                with contextlib.suppress(zmq.Again):
                    self._ventilator_send.send_pyobj((args, kwargs), flags=zmq.NOBLOCK)
                    return
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            # An item that no worker received must not be counted.
            self._ventilated_items -= 1
            raise

    def stop(self) -> None:
        self._stopping = True
        super().stop()


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
        ended = ", ".join(f"{process.pid} ({_end(process.returncode)})" for process in dead)
        raise ReaderError(
            f"reader_pool_type: expected {len(self._processes)} worker processes to read, but "
            f"process {ended} ended. If memory was short, set fewer train_reader_num_workers, or "
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

    Petastorm itself shards by whole row groups and chooses their order. This class uses its
    `Reader` and worker pools, but gives the workers the planned row ranges. Each row is thus read
    once, and the order depends only on the seed.

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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop all readers and delete the cache."""
        super().__exit__(exc_type, exc, traceback)
        if self._cached_tables is not None:
            self._cached_tables.cleanup()

    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges with a pool of Petastorm workers; see `PlannedDataModule.read`.

        With ``reader_pool_type="dummy"``, the calling thread reads, without Petastorm's reader.
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
            reader = self._open_reader(items, workers, interleaved)
            try:
                for table in _in_sequence(reader, reader.ventilator.make_room):
                    file = table.schema.metadata[_FILE].decode()
                    yield table_to_columns(table, self.columns, file)
            finally:
                reader.stop()
                reader.join()

    def _items(
        self, work: Iterator[Sequence[InterleaveGroup]], files: RangeFiles, threads: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the work items for the workers. Petastorm consumes them some items ahead."""
        # A worker with threads reads ahead by itself, and cached rows need not be fetched.
        announced = self.reader_pool_type == "thread" and not threads and not self._cached_tables
        shared = _pickled(files) if self.reader_pool_type == "process" else files
        for sequence, groups in enumerate(work):
            ranges = [slices for group in groups for slices in group]
            if announced:
                for slices in ranges:
                    files.announce(slices)
            yield {
                "files": shared,
                # Worker processes are short-lived. This process reads each footer once and sends
                # it.
                "tails": files.tails(ranges) if self.reader_pool_type == "process" else {},
                "groups": groups,
                "threads": threads,
                "sequence": sequence,
            }

    def _open_reader(
        self, items: Iterator[dict[str, Any]], workers: int, one_at_a_time: bool
    ) -> _PlannedReader:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore", FutureWarning)
            # Petastorm reads all footers when it creates a reader, and supports only some
            # filesystems and types. The workers receive their own work items, so the reader gets a
            # placeholder file.
            shown = os.path.join(folder, "shown.parquet")
            parquet.write_table(pa.table({"row": [0]}), shown)
            return _PlannedReader(
                FilesystemResolver("file:///").filesystem(),
                [shown],
                items=items,
                one_at_a_time=one_at_a_time,
                schema_fields=None,
                reader_pool=WatchedProcessPool(workers, _Serializer())
                if self.reader_pool_type == "process"
                else SleepingThreadPool(workers, results_queue_size=1),  # at least five per worker
                worker_class=_RangeWorker,
                is_batched_reader=True,
                cache=self._cached_tables,
            )


def _in_sequence(
    tables: Iterable[pa.Table], make_room: Callable[[], None]
) -> Generator[pa.Table, None, None]:
    """Yield tables in the order of the requests; process pools answer in any order.

    `make_room` is called when the last table of an item is available. This limits the tables that
    wait here for a slow or dead worker.
    """
    early: dict[tuple[int, int], pa.Table] = {}
    position = (0, 0)
    for table in tables:
        early[_numbers(table, _PART)] = table
        while (table := early.pop(position, None)) is not None:
            following = _numbers(table, _NEXT)
            if following[0] > position[0]:
                make_room()
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


class _PlannedReader(Reader):
    """Petastorm's reader with planned row ranges instead of Petastorm's sharding."""

    def __init__(
        self, *args: Any, items: Iterator[dict[str, Any]], one_at_a_time: bool, **kwargs: Any
    ) -> None:
        self._items = items
        self._one_at_a_time = one_at_a_time
        super().__init__(*args, **kwargs)

    def _filter_row_groups(
        self, dataset: Any, row_groups: Sequence[Any], *args: Any
    ) -> tuple[list[int], None]:
        return list(range(len(row_groups))), None

    def _create_ventilator(self, *args: Any) -> _RangeVentilator:
        in_flight = 1 if self._one_at_a_time else self._workers_pool.workers_count + 2
        self.ventilator = _RangeVentilator(self._workers_pool.ventilate, self._items, in_flight)
        return self.ventilator


class _RangeVentilator(Ventilator):
    """Send row ranges to the workers, a bounded number of them ahead of the consumer."""

    def __init__(
        self,
        ventilate: Any,
        items: Iterator[dict[str, Any]],
        in_flight: int,
    ) -> None:
        super().__init__(ventilate)
        self._items = items
        self._room = threading.Semaphore(in_flight)
        self._stopping = False
        self._ventilated = 0
        self._processed = 0
        self._all_ventilated = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="hvd_estimators row ranges", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def processed_item(self) -> None:
        self._processed += 1

    def make_room(self) -> None:
        """Allow one more range to be read."""
        self._room.release()

    def completed(self) -> bool:
        """Return whether all ranges have been processed; raise the error that ended the thread.

        A pool without pending work calls this method and stops reading on True. The call can
        precede the arrival of the last range, so the range must be processed, too.
        """
        if self._error is not None:
            raise self._error
        return self._all_ventilated and self._processed == self._ventilated

    def stop(self) -> None:
        self._stopping = True
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._hand_out()
        except BaseException as error:
            self._error = error

    def _hand_out(self) -> None:
        upcoming = next(self._items, None)
        self._all_ventilated = upcoming is None
        while (item := upcoming) is not None:
            upcoming = next(self._items, None)
            self._room.acquire()
            if self._stopping:
                return
            self._ventilated += 1
            # Set this before sending the item. After the item is processed, the pool no longer
            # waits.
            self._all_ventilated = upcoming is None
            self._ventilate_fn(**item)


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

    def read(self, slices: RangeRead) -> Generator[tuple[tuple[pa.Table, str], bool], None, None]:
        """Yield each table of a range with the file's path, and whether it ends a slice."""
        row_range = slices.row_range
        tables = self._read_tables(slices)
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
                where = (row_range.file, row_range.row_group, row_range.start, slices.rows, part)
                fill = functools.partial(read_up_to, part)
                table, ends_slice, is_last = self._cache.get(" ".join(map(str, where)), fill)
                yield (table, row_range.file), ends_slice

    def _read_tables(self, slices: RangeRead) -> Generator[tuple[pa.Table, bool, bool], None, None]:
        """Yield each table with flags for the end of a slice and of the range.

        The file is opened with the first table.
        """
        with self.files.open(slices) as file:
            tables = range_tables(file, slices, self.files.specs)
            table, ends_slice = next(tables)
            for following in tables:
                yield table, ends_slice, False
                table, ends_slice = following
            yield table, ends_slice, True


class _RangeWorker(ArrowReaderWorker):
    """Worker that reads row ranges as Arrow tables."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: _RangeReader | None = None

    @staticmethod
    def new_results_queue_reader() -> _TableQueueReader:
        return _TableQueueReader()

    def process(self, **item: Any) -> None:
        try:
            self._process(**item)
        except WorkerTerminationRequested:
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
            self._reader = _RangeReader(files, self._local_cache)
        self._reader.files.footers.add(tails)
        upcoming = iter(groups)
        if threads and isinstance(self._local_cache, NullCache):
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


class _TableQueueReader:
    """Take tables directly from the pool; Petastorm would convert them through pandas."""

    batched_output = True

    def read_next(self, workers_pool: Any, schema: Any, ngram: Any) -> pa.Table:
        try:
            result = workers_pool.get_results()
        except EmptyResultError:
            raise StopIteration from None
        if isinstance(result, _Failure):
            raise result.as_error()
        return result
