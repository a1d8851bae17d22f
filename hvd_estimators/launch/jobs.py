"""Our Spark jobs: known by a tag, in the caller's job group, and with a limit on their waiting.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark import InheritableThread

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster import Cluster
from hvd_estimators.launch.failures import typed_failure

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

__all__ = ["barrier_job", "interruptible", "jobs_on", "spark_job"]

_TAG = "hvd_estimators"
_POLL_SECONDS = 0.2
_PROPERTIES = ("spark.job.tags", "spark.job.description", "spark.job.interruptOnCancel")


@contextlib.contextmanager
def spark_job(
    context: SparkContext, description: str | None = None, *, ranks: bool = False
) -> Iterator[str]:
    """Run the block's Spark jobs so that they end with it, and their failures are typed errors.

    The jobs keep the thread's job group, scheduler pool and other properties.

    Parameters
    ----------
    context : SparkContext
        What runs them.
    description : str, optional
        Shown by Spark unless the thread has set one.
    ranks : bool
        Whether the tasks only run ranks: they are then interrupted when they are cancelled, and any
        other failure that Spark raises becomes a typed error, too.

    Yields
    ------
    str
        A tag that these jobs alone have.

    Raises
    ------
    JobCancelledError
        If they are cancelled.
    DependencyError
        If the executors' Python does not start, has another version or lacks a package.
    ResultsError
        If the driver does not accept their results.
    WorkerFailedError
        If an executor or its Python process ends.
    """
    tag = f"{_TAG}-{uuid.uuid4().hex}"
    before = {name: context.getLocalProperty(name) for name in _PROPERTIES}
    try:
        context.addJobTag(_TAG)
        context.addJobTag(tag)
        if ranks:
            # Not for tasks that write: HDFS may take an interrupt for the failure of a node.
            context.setLocalProperty("spark.job.interruptOnCancel", "true")
        if description and not before["spark.job.description"]:
            context.setLocalProperty("spark.job.description", description)
        yield tag
    except BaseException as error:
        # The context may have been stopped.
        with contextlib.suppress(Exception):
            context.cancelJobsWithTag(tag)
        typed = typed_failure(error, Cluster(context), tag, all_failures=ranks)
        if typed is None:
            raise
        raise typed from error
    finally:
        with contextlib.suppress(Exception):
            for name, value in before.items():
                # None removes a property, which the type hints do not know.
                context.setLocalProperty(name, value)  # type: ignore[arg-type]


def jobs_on(frame: DataFrame) -> contextlib.AbstractContextManager[object]:
    """Run jobs on a user's DataFrame as `spark_job` does; with Spark Connect, just run them."""
    context = getattr(frame.sparkSession, "sparkContext", None)
    return contextlib.nullcontext() if context is None else spark_job(context)


@contextlib.contextmanager
def barrier_job(cluster: Cluster, num_proc: int, start_timeout: float) -> Iterator[None]:
    """Run the block's barrier job as `spark_job` does, and end it if its tasks do not start.

    Time during which our other jobs hold the task slots does not count, since fits that run side by
    side take turns.

    Raises
    ------
    SlotsError
        If the tasks have not started in time.
    """
    context = cluster.context
    timed_out, finished = threading.Event(), threading.Event()

    def cancel_late_start(tag: str) -> None:
        waited, last = 0.0, time.monotonic()
        while not finished.wait(_POLL_SECONDS):
            try:
                if cluster.active_tasks(cluster.jobs(tag), ended=True) >= num_proc:
                    return
                if waited > start_timeout:
                    timed_out.set()
                    context.cancelJobsWithTag(tag)
                    return
                held = _held_by_others(cluster, tag, num_proc)
            except Exception:
                return  # the context has been stopped
            now = time.monotonic()
            waited, last = waited + (0 if held else now - last), now

    try:
        named = spark_job(context, f"Horovod on {num_proc} ranks", ranks=True)
        with cluster.accepting_barrier_jobs(), named as tag:
            watcher = threading.Thread(target=cancel_late_start, args=(tag,), daemon=True)
            watcher.start()
            try:
                yield
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


def interruptible(collect: Callable[[], list[Any]]) -> list[Any]:
    """Return what a Spark job collects; raises KeyboardInterrupt where the user interrupts that.

    Python handles signals in its main thread. PySpark's handler, which cancels all jobs, fails
    where that thread is in the middle of a call to the JVM, and spoils this call.
    """
    if threading.current_thread() is not threading.main_thread():
        return collect()
    rows: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            rows.extend(collect())
        except BaseException as error:
            errors.append(error)

    # With this thread's job group and tags.
    thread = InheritableThread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return rows


def _held_by_others(cluster: Cluster, tag: str, num_proc: int) -> bool:
    """Return whether our other jobs leave too few task slots."""
    others = (cluster.active_jobs() & cluster.jobs(_TAG)) - cluster.jobs(tag)
    held = cluster.active_tasks(others)
    return held > 0 and cluster.task_slots() - held < num_proc
