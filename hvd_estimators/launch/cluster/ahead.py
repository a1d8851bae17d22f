"""Frameworks that executors import while the driver still prepares the data of ranks.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch.cluster.jobs import spark_job
from hvd_estimators.launch.rank.warm import IDLE_SECONDS
from hvd_estimators.launch.task.entry import import_task

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.task.job import Job

__all__ = ["importing"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5
_END_SECONDS = 10.0
# When executors of which application were asked for which imports.
_asked: dict[object, float] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def importing(cluster: Cluster, num_proc: int, job: Job) -> Iterator[None]:
    """Let executors begin to import what the ranks of a job will need, beside the block.

    A barrier job asks for it, since its tasks come to all executors; it takes a moment, and what it
    fails of is left for the ranks' own job to say. Asked for once while the processes that import
    stay.

    Parameters
    ----------
    cluster : Cluster
        The application, with what its tasks ask for.
    num_proc : int
        Number of ranks.
    job : Job
        What tells the environment and the modules.
    """
    known = (cluster.application, job.modules, job.executable, tuple(sorted(job.env.items())))
    now = time.monotonic()
    with _lock:
        is_new = now - _asked.get(known, float("-inf")) > IDLE_SECONDS / 2
        _asked[known] = now
    if not is_new:
        yield
        return
    tags: list[str] = []

    def ask() -> None:
        task = functools.partial(import_task, job=job)
        asking = spark_job(cluster, "Imports for ranks", ranks=True)
        with contextlib.suppress(Exception), asking as tag:
            tags.append(tag)
            cluster.collect(num_proc, task, "x int")

    # With the caller's job group, by which the job can be cancelled.
    thread = cluster.thread(ask)
    thread.start()
    try:
        yield
    finally:
        # Mostly it has begun and is about to end; a task that is cancelled takes its Python along.
        thread.join(_GRACE_SECONDS)
        ended = time.monotonic() + _END_SECONDS
        while thread.is_alive() and time.monotonic() < ended:
            for tag in tags:
                cluster.cancel(tag)
            thread.join(_POLL_SECONDS)
