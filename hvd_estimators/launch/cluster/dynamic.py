"""Barrier jobs with dynamic allocation: executors are asked for first, and held by the ranks.

Spark refuses a barrier stage while ``spark.dynamicAllocation.enabled`` is true, because it would
not ask for executors for a stage that starts as a whole. So an ordinary job asks for them: as many
tasks as there are ranks, which only wait. Executors that have been busy stay for some seconds, and
those that run a rank are not taken away. What refuses looks at the setting when a job is submitted
(`Cluster.accepting_barrier_jobs`). Runs on the driver.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from hvd_estimators.launch.cluster.jobs import spark_job

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.cluster.profiles import TaskResources

__all__ = ["ask_for_executors", "most_slots"]

_POLL_SECONDS = 0.2
_END_SECONDS = 10.0


def most_slots(cluster: Cluster, resources: TaskResources) -> int | None:
    """Return how many tasks can run at the same time at most; None where nobody knows."""
    conf = cluster.conf
    executors = conf.get("spark.dynamicAllocation.maxExecutors", "")
    default = None if cluster.master.startswith(("spark:", "local-cluster")) else "1"
    cores = conf.get("spark.executor.cores", default)
    if not executors.isdigit() or cores is None or resources.resource_profile is not None:
        return None
    each = resources.cpus_per_task or int(conf.get("spark.task.cpus", "1"))
    return int(executors) * (int(cores) // each)


def ask_for_executors(cluster: Cluster, wanted: int, timeout: float) -> int:
    """Wait until as many tasks as are wanted can run at the same time; return how many can.

    Parameters
    ----------
    cluster : Cluster
        The application, with what its tasks ask for.
    wanted : int
        How many.
    timeout : float
        Seconds to wait at most.
    """
    slots = cluster.task_slots()
    if slots >= wanted:
        return slots
    context, ended = cluster.context, time.monotonic() + timeout
    tag: list[str] = []

    def ask() -> None:
        numbers: Any = context.parallelize(range(wanted), wanted)
        if cluster.profile is not None:
            numbers = numbers.withResources(cluster.profile)
        job = spark_job(cluster, "Executors for ranks", ranks=True)
        with contextlib.suppress(Exception), job as mine:
            tag.append(mine)
            numbers.foreach(_wait)

    # With the caller's job group, by which the job can be cancelled.
    thread = cluster.thread(ask)
    thread.start()
    try:
        while slots < wanted and time.monotonic() < ended and thread.is_alive():
            time.sleep(_POLL_SECONDS)
            slots = cluster.task_slots()
    finally:
        for name in tag:
            cluster.cancel(name)
        thread.join(_END_SECONDS)
    return slots


def _wait(_: int) -> None:
    time.sleep(3600)
