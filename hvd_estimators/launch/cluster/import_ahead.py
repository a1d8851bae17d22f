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
from hvd_estimators.launch.task.entry import import_task
from hvd_estimators.launch.warm.client import IDLE_SECONDS

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.task.spec import Job

__all__ = ["importing"]

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 0.5
_END_SECONDS = 10.0
# Mostly 1 s or 2; a busy machine takes long to start Python.
_PATIENCE_SECONDS = 30.0
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
    patience = _PATIENCE_SECONDS
    try:
        yield
    except Exception:
        raise
    except BaseException:
        patience = 0.0  # the user has interrupted, and waits
        raise
    finally:
        _end(cluster, thread, tags, patience)


def _end(cluster: Cluster, thread: threading.Thread, tags: list[str], patience: float) -> None:
    """Wait until the job has ended, and cancel one whose tasks wait for slots.

    Tasks that have begun take a moment. If they were cancelled, or if the program ended before
    them, Spark would log errors with stacks below the message of what has failed in the block.
    """
    now = time.monotonic()
    given_up, ended, waits_since = now + patience, now + patience + _END_SECONDS, now
    while thread.is_alive() and now < ended:
        thread.join(_POLL_SECONDS)
        now = time.monotonic()
        if not any(_has_no_slots(cluster, tag) for tag in tags):
            waits_since = now
        if now > given_up or now - waits_since > _GRACE_SECONDS:
            for tag in tags:
                with contextlib.suppress(Exception):  # the context has been stopped
                    cluster.cancel(tag)


def _has_no_slots(cluster: Cluster, tag: str) -> bool:
    """Return whether a job waits for slots, as far as that is known: it is not over Connect."""
    with contextlib.suppress(Exception):
        return bool(cluster.jobs(tag)) and not cluster.started_tasks(tag)
    return False
