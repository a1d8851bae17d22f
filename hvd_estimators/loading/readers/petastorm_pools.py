"""Petastorm's worker pools, without idle work and without waiting for dead workers."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
import warnings
from collections.abc import Sequence
from subprocess import Popen
from typing import Any

import zmq

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 calls deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer
    from petastorm.workers_pool.dummy_pool import DummyPool
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.thread_pool import ThreadPool, WorkerTerminationRequested

from hvd_estimators.exceptions import ReaderError

__all__ = ["make_pool"]

_LAST_WORDS_MS = 1000
"""How long something that a dead worker sent may take to arrive."""

_LOOK_SECONDS = 1.0
"""How long workers that send results are not checked."""

_RETRY_SECONDS = 0.05
"""How long work waits if no worker has room for it."""


def make_pool(pool_type: str, workers: int) -> Any:
    """Return a pool of threads, of processes, or ("dummy") of no worker but the caller."""
    if pool_type == "thread":
        return SleepingThreadPool(workers, results_queue_size=1)  # five for each worker, at least
    if pool_type == "process":
        return WatchedProcessPool(workers, ArrowTableSerializer())
    return DummyPool()


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
    """Petastorm's processes, with an error if one dies; Petastorm would wait for it for ever."""

    _results_receiver_poller: Any
    _stopping = False

    def start(self, worker_class: Any, worker_args: Any = None, ventilator: Any = None) -> None:
        super().start(worker_class, worker_args, ventilator)
        self._results_receiver_poller = _WatchfulPoller(
            self._results_receiver_poller, self._workers
        )

    def ventilate(self, *args: Any, **kwargs: Any) -> None:
        # Petastorm's own method tries for 20 seconds if no worker is left.
        self._ventilated_items += 1
        while not self._stopping:
            with contextlib.suppress(zmq.Again):
                self._ventilator_send.send_pyobj((args, kwargs), flags=zmq.NOBLOCK)
                return
            time.sleep(_RETRY_SECONDS)

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
