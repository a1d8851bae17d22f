"""Framework imports on executors while the driver still prepares the ranks' data.

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
# Usually 1 s or 2 s, but a busy machine takes longer to start Python.
_PATIENCE_SECONDS = 30.0
# Time of the last request, for each application and its imports.
_asked: dict[object, float] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def importing(cluster: Cluster, num_proc: int, job: Job) -> Iterator[None]:
    """Let executors import the modules of a job's ranks, concurrently with the block.

    A barrier job sends the request, because its tasks reach all executors. The request takes only a
    moment. Its errors are ignored, because the ranks' own job reports them. It is not repeated
    while the importing processes live.

    Parameters
    ----------
    cluster : Cluster
        The application, with the resources that its tasks request.
    num_proc : int
        Number of ranks.
    job : Job
        Contains the environment and the modules.
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

    # The thread inherits the caller's job group, so that the job can be cancelled.
    thread = cluster.thread(ask)
    thread.start()
    patience = _PATIENCE_SECONDS
    try:
        yield
    except Exception:
        raise
    except BaseException:
        patience = 0.0  # the user has interrupted the block and waits
        raise
    finally:
        _end(cluster, thread, tags, patience)


def _end(cluster: Cluster, thread: threading.Thread, tags: list[str], patience: float) -> None:
    """Wait until the job has ended, and cancel it if its tasks wait for slots.

    Running tasks end within a moment. If they were cancelled, or if the program ended before them,
    Spark would log stack traces. These would follow the error message of the block.
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
    """Return whether a job waits for slots; False if unknown, as over Spark Connect."""
    with contextlib.suppress(Exception):
        return bool(cluster.jobs(tag)) and not cluster.started_tasks(tag)
    return False
