"""Spark jobs of this package: tagged, in the caller's job group, and with a limited wait.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import pyarrow as pa

from hvd_estimators._util.spark_session import current_session, using_session
from hvd_estimators._util.unpickle_imports import loads
from hvd_estimators.exceptions import HvdEstimatorsError, SlotsError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.spark_errors import typed_failure
from hvd_estimators.launch.task.entry import import_task
from hvd_estimators.launch.warm.client import idle_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.task.settings import TaskSettings

A = TypeVar("A")
B = TypeVar("B")

_TAG = "hvd_estimators"

_purpose: ContextVar[str | None] = ContextVar("purpose", default=None)


@contextlib.contextmanager
def describing(purpose: str) -> Iterator[None]:
    """Show a purpose in Spark's UI for the jobs that this thread starts in the block.

    It replaces the descriptions of this package's code, and not one that the user has set.
    """
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


@contextlib.contextmanager
def spark_job(
    cluster: Cluster, description: str | None = None, *, ranks: bool = False
) -> Iterator[str]:
    """Run the block's Spark jobs so that they end with the block and fail with typed errors.

    The jobs keep the thread's job group, scheduler pool and other properties.

    Parameters
    ----------
    cluster : Cluster
        The application that runs the jobs.
    description : str, optional
        Shown by Spark unless the thread has set one, or is in a block of `describing`.
    ranks : bool
        Whether the tasks only run ranks. Cancelled tasks are then interrupted, and any other
        failure that Spark raises becomes a typed error, too.

    Yields
    ------
    str
        A tag that only these jobs have.

    Raises
    ------
    JobCancelledError
        If the jobs are cancelled.
    DependencyError
        If the executors' Python does not start, has another version or lacks a package.
    ResultsError
        If the driver does not accept the jobs' results.
    WorkerFailedError
        If an executor or its Python process ends.
    """
    tag = f"{_TAG}-{uuid.uuid4().hex}"
    try:
        with cluster.tagged([_TAG, tag], _purpose.get() or description, ranks):
            yield tag
    except BaseException as error:
        # The application may have been stopped.
        with contextlib.suppress(Exception):
            cluster.cancel(tag)
        typed = typed_failure(error, cluster, tag, all_failures=ranks)
        if typed is None:
            raise
        raise typed from error


@contextlib.contextmanager
def jobs_on(frame: DataFrame) -> Iterator[None]:
    """Run jobs on a user's DataFrame in its session, with the guarantees of `spark_job`."""
    with using_session(frame.sparkSession), spark_job(current_cluster()):
        yield


@contextlib.contextmanager
def barrier_job(cluster: Cluster, num_proc: int, start_timeout: float) -> Iterator[str]:
    """Run the block's barrier job as `spark_job` does, and cancel it if its tasks do not start.

    Time during which other jobs of this package hold the task slots does not count, because
    concurrent fits take turns.

    Yields
    ------
    str
        A tag that only this job has.

    Raises
    ------
    SlotsError
        If the tasks have not started in time.
    """
    timed_out, finished = threading.Event(), threading.Event()

    def watch_start(tag: str) -> None:
        waited, last = 0.0, time.monotonic()
        while not finished.wait(timeouts.SPARK_POLL):
            try:
                if cluster.started_tasks(tag) >= num_proc:
                    return
                is_waiting = _waits_its_turn(cluster, tag, num_proc)
            except Exception:
                return  # the context has been stopped
            now = time.monotonic()
            waited, last = waited + (0 if is_waiting else now - last), now
            if waited > start_timeout:
                timed_out.set()
                _cancel_until(finished.wait, lambda: cluster.cancel(tag))

    cluster.accept_barrier_jobs()
    try:
        with spark_job(cluster, f"Run on {num_proc} ranks", ranks=True) as tag:
            watcher = threading.Thread(target=watch_start, args=(tag,), daemon=True)
            watcher.start()
            try:
                yield tag
            finally:
                finished.set()
                watcher.join()
    except Exception as error:
        if not timed_out.is_set():
            raise
        raise SlotsError(
            f"Timed out waiting for Spark tasks to start: {num_proc} task slots were "
            f"not free within {start_timeout:g} seconds. Other jobs hold them; "
            "wait for these, or set a longer start_timeout."
        ) from error


def _waits_its_turn(cluster: Cluster, tag: str, num_proc: int) -> bool:
    """Return whether other jobs of this package hold the task slots that a job needs."""
    left = cluster.slots_beside(tag, _TAG)
    return left is not None and left < num_proc


def interruptible(cluster: Cluster, tag: str, collect: Callable[[], list[Any]]) -> list[Any]:
    """Return the rows that a Spark job collects; raise KeyboardInterrupt if the user interrupts.

    Python handles signals in its main thread. PySpark's handler, which cancels all jobs, fails if
    that thread is in a call to the JVM, and breaks this call. So the job runs in another thread. If
    this function raises, that thread has ended, or another one goes on cancelling the job.

    Parameters
    ----------
    cluster : Cluster
        The application that runs the job.
    tag : str
        The job's tag.
    collect : callable
        Runs the job, and returns its rows.
    """
    if threading.current_thread() is not threading.main_thread():
        return collect()
    rows: list[Any] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            rows.extend(collect())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = cluster.thread(run)
    has_ended = functools.partial(_has_ended, thread, ended)
    try:
        thread.start()
        # A signal that another thread receives does not wake up this one.
        while not has_ended(timeouts.SPARK_POLL):
            pass
    except BaseException:
        _cancel_in_background(has_ended, lambda: cluster.cancel(tag))
        has_ended(timeouts.JOB_CANCEL)
        raise
    if errors:
        raise errors[0]
    if not ended.is_set():
        raise RuntimeError("The thread of a Spark job ended before the job. Is Spark stopped?")
    return rows


def _has_ended(thread: threading.Thread, ended: threading.Event, seconds: float) -> bool:
    """Wait for a thread's event, which it does not set if PySpark fails to start its function.

    An interrupt of ``Thread.join`` would make a running thread count as ended.
    """
    return ended.wait(seconds) or not thread.is_alive()


def _cancel_until(has_ended: Callable[[float], bool], cancel: Callable[[], object]) -> None:
    """Cancel jobs until their thread has ended; it may not have submitted them yet."""
    while not has_ended(timeouts.SPARK_POLL):
        with contextlib.suppress(Exception):  # the context has been stopped
            cancel()


def _cancel_in_background(has_ended: Callable[[float], bool], cancel: Callable[[], object]) -> None:
    threading.Thread(target=_cancel_until, args=(has_ended, cancel), daemon=True).start()


class BackgroundJob:
    """A Spark job in another thread, which starts at once. Its errors are ignored.

    The job belongs to the caller's job group, so it can be cancelled with that group.

    Parameters
    ----------
    cluster : Cluster
        The application that runs the job.
    description : str
        Shown by Spark unless the caller has set one.
    run : callable
        Runs the job and waits for it.
    """

    def __init__(self, cluster: Cluster, description: str, run: Callable[[], object]) -> None:
        self._cluster, self._description, self._run = cluster, description, run
        self._tag: str | None = None
        self._ended = threading.Event()
        self._thread = cluster.thread(self._run_tagged)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for at most some seconds, and return whether the job has ended."""
        return _has_ended(self._thread, self._ended, seconds)

    def cancel(self) -> None:
        """Cancel the job, without waiting for its end."""
        _cancel_in_background(self.wait, self._cancel_once)

    def _cancel_once(self) -> None:
        if self._tag is not None:
            self._cluster.cancel(self._tag)

    def _run_tagged(self) -> None:
        job = spark_job(self._cluster, self._description, ranks=True)
        try:
            with contextlib.suppress(Exception), job as self._tag:
                self._run()
        finally:
            self._ended.set()


# Time of the last request, for each application and its imports.
_requested: dict[object, float] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def importing(cluster: Cluster, num_proc: int, settings: TaskSettings) -> Iterator[None]:
    """Let executors import the modules of a job's ranks, concurrently with the block.

    A barrier job sends the request, because its tasks reach all executors; with a local master, one
    task does, which needs no more than one free slot. The request takes only a moment. Its errors
    are ignored, because the ranks' own job reports them. It is not repeated
    while the importing processes live.

    Parameters
    ----------
    cluster : Cluster
        The application, with the resources that its tasks request.
    num_proc : int
        Number of ranks.
    settings : TaskSettings
        Contains the environment and the modules.
    """
    key = (
        *(cluster.application, settings.modules, settings.executable),
        tuple(sorted(settings.env.items())),
    )
    now = time.monotonic()
    with _lock:
        is_new = now - _requested.get(key, float("-inf")) > idle_seconds(os.environ) / 2
        _requested[key] = now
    if not is_new:
        yield
        return
    task = functools.partial(import_task, settings=settings)
    tasks = 1 if cluster.is_local else num_proc
    collect = functools.partial(cluster.collect, tasks, task, "x int", barrier=not cluster.is_local)
    request = BackgroundJob(cluster, "Imports for ranks", collect)
    try:
        yield
    finally:
        # Started tasks end within a moment. Others wait for slots.
        if not request.wait(timeouts.IMPORT_JOB):
            request.cancel()
            request.wait(timeouts.JOB_CANCEL)


def spread_over_tasks(
    function: Callable[[Sequence[A]], list[B]], parts: Sequence[Sequence[A]], *, description: str
) -> list[list[B]]:
    """Call a function with each part in Spark's tasks, and return the results in their order.

    Parameters
    ----------
    function : callable
        Serializable by cloudpickle, as are its results. Runs in the tasks, whose Python has this
        package.
    parts : sequence of sequence
        The parts, which pickle serializes.
    description : str
        Shown by Spark.

    Raises
    ------
    HvdEstimatorsError
        The typed error of the first part that has one, or an error of `spark_job`.
    """
    rows = [(zlib.compress(pickle.dumps(part), 1),) for part in parts]
    sent = cloudpickle.dumps(function)

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[list[B]]:
        called = pickle.loads(sent)
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield called(pickle.loads(zlib.decompress(part)))

    with spark_job(current_cluster(), description):
        return collect_results(current_session().createDataFrame(rows, "part binary"), call)


def collect_results(
    frame: DataFrame, function: Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]
) -> list[Any]:
    """Call a function with the batches of each partition, and return all results in their order.

    Parameters
    ----------
    frame : DataFrame
        The rows.
    function : callable
        Yields results that cloudpickle serializes. Runs in the tasks.

    Raises
    ------
    HvdEstimatorsError
        The first typed error of a task.
    """

    def results(batches: Iterator[pa.RecordBatch]) -> Iterator[Any]:
        try:
            yield from function(batches)
        except HvdEstimatorsError as error:
            # A raised error would be repeated, and Spark's error shows only its text.
            yield error
            for _ in batches:  # Spark's worker must read its input to the end
                pass

    def call(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for result in results(iter(batches)):
            packed = zlib.compress(cloudpickle.dumps(result), 1)
            yield pa.RecordBatch.from_pydict({"result": pa.array([packed], pa.binary())})

    rows = frame.mapInArrow(call, "result binary").collect()
    collected = [loads(zlib.decompress(row["result"])) for row in rows]
    for result in collected:
        if isinstance(result, HvdEstimatorsError):
            raise result
    return collected
