"""Cluster capacity: slots for all ranks at once, requests for executors, and their end.

Spark rejects a barrier stage while ``spark.dynamicAllocation.enabled`` is true, because it would
not request executors for a stage that starts as a whole. So an ordinary job requests them: it has
as many tasks as there are ranks, and its tasks only wait. Executors that have been busy stay for
some seconds, and Spark does not remove those that run a rank. Spark's check reads the setting when
a job is submitted, so the setting becomes false (`Cluster.accept_barrier_jobs`).

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.cluster.application import await_slots
from hvd_estimators.launch.cluster.jobs import BackgroundJob
from hvd_estimators.launch.rank.preemption import polling

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.cluster.resources import TaskResources

logger = logging.getLogger(__name__)


def ask_for_executors(cluster: Cluster, num_tasks: int, timeout: float) -> int:
    """Request executors for a number of concurrent tasks; return the number of task slots.

    Parameters
    ----------
    cluster : Cluster
        The application, with the resources that its tasks request.
    num_tasks : int
        Number of tasks that must run at the same time.
    timeout : float
        Maximum number of seconds to wait.
    """
    slots = cluster.task_slots()
    if slots >= num_tasks:
        return slots
    deadline = time.monotonic() + timeout
    numbers: Any = cluster.context.parallelize(range(num_tasks), num_tasks)
    if cluster.profile is not None:
        numbers = numbers.withResources(cluster.profile)
    request = BackgroundJob(cluster, "Executors for ranks", lambda: numbers.foreach(_wait))
    try:
        while slots < num_tasks and time.monotonic() < deadline:
            if request.wait(timeouts.SPARK_POLL):
                break
            slots = cluster.task_slots()
    finally:
        request.cancel()
        request.wait(timeouts.JOB_CANCEL)
    return slots


def _wait(_: int) -> None:
    time.sleep(3600)


def check_slots(cluster: Cluster, num_tasks: int, timeout: float, resources: TaskResources) -> None:
    """Check that as many tasks as there are ranks can run at the same time.

    Parameters
    ----------
    cluster : Cluster
        The application, with the resources that its tasks request.
    num_tasks : int
        Number of ranks.
    timeout : float
        Maximum number of seconds to wait for executors.
    resources : TaskResources
        Resources that each task requests, for messages.

    Raises
    ------
    SlotsError
        If they cannot.
    """
    if not cluster.knows_slots:
        return  # Spark waits for slots until start_timeout
    if cluster.allocates_dynamically:
        slots = ask_for_executors(cluster, num_tasks, timeout)
    else:
        slots = await_slots(cluster, num_tasks, 0 if cluster.is_local else timeout)
    if slots >= num_tasks:
        return
    if slots == 0 and not cluster.executors() and not cluster.is_local:
        raise SlotsError(
            f"No executor has registered with the cluster (master {cluster.master}) within "
            f"{timeout:g} seconds. See its logs, or set a longer start_timeout."
        )
    requested = resources.describe()
    raise SlotsError(
        f"num_proc: {num_tasks} ranks need as many task slots at the same time, and the cluster "
        f"(master {cluster.master}) has {slots}{requested and f' with {requested}'}. Set num_proc "
        f"to {slots or 1} or less, let each task ask for less (spark.task.cpus, "
        "spark.task.resource.gpu.amount), or start Spark with more executors "
        "(spark.executor.instances, spark.dynamicAllocation.maxExecutors) or more for each "
        "(spark.executor.cores, "
        "spark.executor.resource.gpu.amount; for a local master the number in local[N])."
    )


def watching_executors(
    cluster: Cluster, tag: str, on_notice: Callable[[], object]
) -> contextlib.AbstractContextManager[None]:
    """Call a function once, if Spark decommissions an executor of a job during the block.

    Parameters
    ----------
    cluster : Cluster
        The application that runs the job.
    tag : str
        A tag that only this job has.
    on_notice : callable
        Called in another thread.
    """
    if not cluster.decommissions:
        return contextlib.nullcontext()

    def is_noticed() -> bool:
        hosts: list[str] = []
        with contextlib.suppress(Exception):  # the context has been stopped
            hosts = cluster.leaving_hosts(tag)
        if hosts:
            logger.warning(
                "Spark decommissions an executor on %s. The ranks are asked to save their state "
                "and to end.",
                ", ".join(hosts),
            )
        return bool(hosts)

    return polling(is_noticed, on_notice)
