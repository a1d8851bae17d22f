"""Petastorm's worker pools, without idle work; a worker that fails or dies raises an error."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

import zmq

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 calls deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.thread_pool import ThreadPool, WorkerTerminationRequested

from hvd_estimators.exceptions import ReaderError

__all__ = ["Failure", "make_pool"]

_LAST_WORDS_MS = 1000
"""How long something that a dead worker sent may take to arrive."""

_LOOK_SECONDS = 1.0
"""How long workers that send results are not checked."""

_RETRY_SECONDS = 0.05
"""How long work waits if no worker has room for it."""

_IDLE_SECONDS = 0.001
"""How long the caller sleeps until the next range is there."""

_START_SECONDS = 300
"""How long worker processes may take to start; Petastorm's own limit is 20 seconds."""

_FAILURE = b"hvd_estimators failure:"
"""First bytes of a serialized failure; those of an Arrow table are others."""


def make_pool(pool_type: str, workers: int) -> Any:
    """Return a pool of threads, of processes, or ("dummy") of no worker but the caller."""
    if pool_type == "thread":
        return SleepingThreadPool(workers, results_queue_size=1)  # five for each worker, at least
    if pool_type == "process":
        return WatchedProcessPool(workers, _Serializer())
    return CallerPool()


@dataclass(frozen=True)
class Failure:
    """The exception of a worker, sent in place of a table."""

    error: BaseException

    def as_error(self) -> BaseException:
        """Return what the consumer raises."""
        if isinstance(self.error, StopIteration):
            # An iterator that raised it would seem to have ended.
            error = ReaderError("A reader's worker raised StopIteration.")
            error.__cause__ = self.error
            return error
        return self.error


class _WorkerTraceback(Exception):
    """The traceback of another process, shown as the cause of its error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Serializer(ArrowTableSerializer):
    """Sends tables as Arrow streams, and failures with their traceback."""

    def serialize(self, rows: Any) -> Any:
        if not isinstance(rows, Failure):
            return super().serialize(rows)
        error = rows.as_error()
        text = "".join(traceback.format_exception(error))
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        dumped = None
        # By reference only: classes of a script must not replace those of the rank.
        with contextlib.suppress(Exception):
            dumped = pickle.dumps(error)
        return _FAILURE + pickle.dumps((dumped, last, text))

    def deserialize(self, serialized_rows: Any) -> Any:
        if bytes(serialized_rows[: len(_FAILURE)]) != _FAILURE:
            return super().deserialize(serialized_rows)
        dumped, last, text = pickle.loads(serialized_rows[len(_FAILURE) :])
        error: BaseException | None = None
        # Exceptions that take other arguments than their message fail here.
        with contextlib.suppress(Exception):
            error = pickle.loads(dumped) if dumped is not None else None
        if not isinstance(error, BaseException):
            error = ReaderError(f"A worker process of the reader failed: {last}")
        error.__cause__ = _WorkerTraceback(text)
        return Failure(error)


class CallerPool:
    """Reads in the thread that asks; Petastorm's own waits forever if no more ranges come."""

    workers_count = 1

    def __init__(self) -> None:
        self._items: deque[dict[str, Any]] = deque()
        self._tables: deque[Any] = deque()

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        self._reader = worker_class(0, self._tables.append, worker_args)
        self._source = ventilator
        ventilator.start()

    def ventilate(self, **item: Any) -> None:
        self._items.append(item)

    def get_results(self) -> Any:
        while not self._tables:
            if self._items:
                self._reader.process(**self._items.popleft())
                self._source.processed_item()
            elif self._source.completed():
                raise EmptyResultError
            else:
                time.sleep(_IDLE_SECONDS)
        return self._tables.popleft()

    def stop(self) -> None:
        self._source.stop()

    def join(self) -> None:
        pass


class SleepingThreadPool(ThreadPool):
    """Petastorm's threads, which sleep while they have nothing to do.

    Its own wake up every millisecond to see whether they are to stop. Each time they ask for the
    interpreter's lock, which training needs.
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
            # A worker may be waiting for room.
            with contextlib.suppress(queue.Empty):
                while True:
                    results.get_nowait()

    def _stop_aware_put(self, worker_id: int, data: Any) -> None:
        if self._stop_event.is_set():
            raise WorkerTerminationRequested
        self._results_queues[worker_id].put(data)


class _WorkQueue(queue.SimpleQueue[Any]):
    """Gives a worker its items; None makes it check whether to stop."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get()
        if item is None:
            raise queue.Empty
        return item


class WatchedProcessPool(ProcessPool):
    """Petastorm's processes, with an error if one dies; Petastorm would wait for it forever."""

    _results_receiver_poller: Any
    _stopping = False

    def _wait_for_workers_to_start(self) -> None:
        poller = _WatchfulPoller(self._results_receiver_poller, self._workers)
        self._results_receiver_poller = poller
        deadline = time.monotonic() + _START_SECONDS
        try:
            for _ in self._workers:
                while not poller.poll(_LOOK_SECONDS * 1000):
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
        # Petastorm's own method tries for 20 seconds if no worker is left.
        self._ventilated_items += 1
        try:
            while not self._stopping:
                with contextlib.suppress(zmq.Again):
                    self._ventilator_send.send_pyobj((args, kwargs), flags=zmq.NOBLOCK)
                    return
                time.sleep(_RETRY_SECONDS)
        except BaseException:
            # An item that no worker gets must not be waited for.
            self._ventilated_items -= 1
            raise

    def stop(self) -> None:
        self._stopping = True
        super().stop()


class _WatchfulPoller:
    """Polls, and checks the processes now and then, and when nothing comes."""

    def __init__(self, poller: Any, processes: Sequence[Popen[bytes]]) -> None:
        self._poller = poller
        self._processes = processes
        self._next_look = 0.0

    def poll(self, timeout: float) -> Any:
        ready = self._poller.poll(timeout)
        if ready and time.monotonic() < self._next_look:
            return ready
        self._next_look = time.monotonic() + _LOOK_SECONDS
        # Workers go on until they are told to stop, and by then nobody polls any more.
        dead = [process for process in self._processes if process.poll() is not None]
        if not dead:
            return ready
        # A worker that was not killed sent an exception first. It arrives in the end, since the
        # others fall silent: they are given nothing more while a range is missing.
        killed = any(process.returncode < 0 for process in dead)
        ready = [] if killed else ready or self._poller.poll(_LAST_WORDS_MS)
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
