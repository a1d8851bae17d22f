"""The Spark application that runs the ranks: slots, hosts, Python, and failed jobs and tasks.

All queries to Spark are in one class, so that another kind of session
(`hvd_estimators.launch.cluster.connect`) only needs another class with the same methods. Runs on
the driver.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import InheritableThread

from hvd_estimators._util.spark_session import current_session
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.cluster.resources import collect_from_tasks
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.task.host_checks import installed_versions

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.resources import Task

logger = logging.getLogger(__name__)


def await_slots(cluster: Cluster, required: int | None, timeout: float) -> int:
    """Return the number of task slots once there are enough or no more executors will register.

    Parameters
    ----------
    cluster : Cluster
        The application.
    required : int or None
        Sufficient number of slots; None waits for all of them.
    timeout : float
        Maximum number of seconds to wait.
    """
    started = time.monotonic()
    patience = timeouts.EXECUTORS_SETTLED if required is None else timeouts.EXECUTORS_LATE
    # The executors of an older application have already registered.
    last_change = started - cluster.age
    expected = expected_executors(cluster.master, cluster.conf)
    is_logged = False
    slots = cluster.task_slots()
    while required is None or slots < required:
        now = time.monotonic()
        if expected is not None and cluster.executors() >= expected:
            slots = cluster.task_slots()
            break
        if now - started >= timeout:
            break
        # If executors have no slots, they lack the resources that tasks request.
        is_registered = slots or cluster.executors()
        if expected is None and is_registered and now - last_change > patience:
            break
        if required is not None and not is_logged and now - started > timeouts.EXECUTORS_SETTLED:
            is_logged = True
            logger.warning(
                "Waiting for executors: the cluster has %d task slots, and %d are needed. After "
                "%g seconds (start_timeout) this is an error.",
                *(slots, required, timeout),
            )
        time.sleep(timeouts.SPARK_POLL)
        before, slots = slots, cluster.task_slots()
        last_change = now if slots != before else last_change
    return slots


def expected_executors(master: str, conf: dict[str, str]) -> int | None:
    """Return the number of executors of an application with a fixed size, or None if unknown.

    Parameters
    ----------
    master : str
        Spark's master URL.
    conf : dict
        Spark's configuration.
    """
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,.*\]", master)
    if cluster:
        return int(cluster[1])
    if master == "yarn" or master.startswith("k8s"):
        return int(conf.get("spark.executor.instances", 2))
    cores, per_executor = conf.get("spark.cores.max"), conf.get("spark.executor.cores")
    if master.startswith("spark:") and cores and per_executor:
        return int(cores) // int(per_executor)
    return None


DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"
"""Spark setting that adds and removes executors with the workload."""

_PROPERTIES = ("spark.job.tags", "spark.job.description", "spark.job.interruptOnCancel")


# Applications with dynamic allocation in which Spark accepts barrier jobs.
_accepting: set[str] = set()


class Cluster:
    """Spark application whose driver is this process.

    Parameters
    ----------
    context : SparkContext
        The application.
    profile : ResourceProfile, optional
        Resources that tasks request, as registered with the application. Default: the application's
        settings.
    session : SparkSession, optional
        The session in which jobs run. Default: `current_session`.
    """

    knows_slots: bool = True
    """True if the number that `task_slots` returns is reliable."""

    def __init__(
        self,
        context: SparkContext,
        profile: ResourceProfile | None = None,
        session: SparkSession | None = None,
    ) -> None:
        self.context = context
        self.profile = profile
        self._session = session

    @property
    def application(self) -> str:
        """The application's id, which changes with a restart of Spark."""
        return str(self.context.applicationId)

    @property
    def master(self) -> str:
        """Spark's master URL."""
        return str(self.context.master)

    @cached_property
    def conf(self) -> dict[str, str]:
        """Spark's configuration, as the application was started."""
        conf = dict(self.context.getConf().getAll())
        return {**conf, DYNAMIC_ALLOCATION: "true"} if self.application in _accepting else conf

    @property
    def is_local(self) -> bool:
        """True if tasks run in the driver's own process."""
        return self.master.split("[")[0] == "local"

    @property
    def allocates_dynamically(self) -> bool:
        """True if executors come and go with the workload; always False for a local master."""
        return self.conf.get(DYNAMIC_ALLOCATION, "false").lower() == "true" and not self.is_local

    def accept_barrier_jobs(self) -> None:
        """Let Spark accept barrier jobs despite dynamic allocation, from now on.

        Spark rejects these jobs because it would not request their executors, so the executors must
        already exist. Its check reads the setting at each job; executors still come and go.
        """
        if self.allocates_dynamically:
            _accepting.add(self.application)
            self._scala.conf().set(DYNAMIC_ALLOCATION, "false")

    @property
    def age(self) -> float:
        """Seconds since the start of the application."""
        return max(time.time() - self.context.startTime / 1000, 0)

    def driver_host(self) -> str:
        """Return the address at which executors reach the driver."""
        return LOOPBACK if self.is_local else self.conf.get("spark.driver.host", LOOPBACK)

    def task_slots(self) -> int:
        """Return the number of tasks that the registered executors can run at once."""
        manager = self._scala.resourceProfileManager()
        if self.profile is None:
            profile = manager.defaultResourceProfile()
        else:
            profile = manager.resourceProfileFromId(self.profile.id)
        return int(self._scala.maxNumConcurrentTasks(profile))

    def executors(self) -> int:
        """Return the number of registered executors."""
        # The driver is included in the size.
        return int(self._scala.getExecutorMemoryStatus().size()) - 1

    def installed_versions(self) -> dict[str, str]:
        """Return the local versions that ranks must match; empty for a local master."""
        return {} if self.is_local else installed_versions()

    @contextlib.contextmanager
    def tagged(self, tags: Sequence[str], description: str | None, ranks: bool) -> Iterator[None]:
        """Tag the block's jobs, in addition to the thread's job group and other properties.

        Parameters
        ----------
        tags : sequence of str
            The tags.
        description : str or None
            Shown by Spark unless the thread has set one.
        ranks : bool
            Whether cancelled tasks are interrupted. HDFS may mistake an interrupted write for the
            failure of a node.
        """
        context = self.context
        before = {name: context.getLocalProperty(name) for name in _PROPERTIES}
        try:
            for tag in tags:
                context.addJobTag(tag)
            if ranks:
                context.setLocalProperty("spark.job.interruptOnCancel", "true")
            if description and not before["spark.job.description"]:
                context.setLocalProperty("spark.job.description", description)
            yield
        finally:
            # The context may have been stopped.
            with contextlib.suppress(Exception):
                for name, value in before.items():
                    # None removes a property; the type hints do not cover this.
                    context.setLocalProperty(name, value)  # type: ignore[arg-type]

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with a tag."""
        self.context.cancelJobsWithTag(tag)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a thread whose jobs inherit this thread's job group and tags."""
        return InheritableThread(target=target, daemon=True)

    def collect(
        self, num_tasks: int, task: Task, schema: str, *, barrier: bool = True
    ) -> list[Any]:
        """Run a job and return the rows of its tasks; see `collect_from_tasks`."""
        session = self._session or current_session()
        return collect_from_tasks(session, num_tasks, task, schema, self.profile, barrier=barrier)

    def started_tasks(self, tag: str) -> int:
        """Return the number of tasks that have started in the jobs with a tag."""
        return self.active_tasks(self.jobs(tag), with_completed=True)

    def slots_beside(self, tag: str, shared_tag: str) -> int | None:
        """Return the task slots that related jobs leave to one of them; None if they hold no slots.

        Parameters
        ----------
        tag : str
            A tag that only this job has.
        shared_tag : str
            A tag that all related jobs have.
        """
        active = set(self.context.statusTracker().getActiveJobsIds())
        num_held = self.active_tasks((active & self.jobs(shared_tag)) - self.jobs(tag))
        return self.task_slots() - num_held if num_held else None

    def jobs(self, tag: str) -> set[int]:
        """Return the ids of the jobs with a tag."""
        # PySpark's own status tracker only supports job groups.
        return set(self._scala.statusTracker().getJobIdsForTag(tag))

    def active_tasks(self, jobs: set[int], with_completed: bool = False) -> int:
        """Return the number of running tasks of some jobs.

        If ``with_completed`` is true, completed tasks of active stages also count.
        """
        stage_ids = {stage for job in jobs for stage in self._stages(job)}
        # PySpark's own status tracker counts a started task only after the next event.
        stages = self._scala.statusStore().activeStages()
        active = 0
        for stage in (stages.apply(i) for i in range(stages.size())):
            if stage.stageId() in stage_ids:
                active += stage.numActiveTasks()
                active += stage.numCompleteTasks() if with_completed else 0
        return active

    def failed_tasks(self, tag: str) -> list[tuple[int, str, str]] | None:
        """Return the failed tasks of the jobs with a tag, or None if unknown.

        Each has the time of its failure, in milliseconds since the epoch, and the names of its host
        and its executor.
        """
        failed = []
        for task in self._tasks(tag, "FAILED"):
            took = task.duration()
            ended_at = task.launchTime().getTime() + (took.get() if took.isDefined() else 0)
            failed.append((ended_at, task.host(), task.executorId()))
        return failed

    @property
    def decommissions(self) -> bool:
        """True if Spark gives notice before an executor goes (``spark.decommission.enabled``)."""
        return self.conf.get("spark.decommission.enabled", "false").lower() == "true"

    def leaving_hosts(self, tag: str) -> list[str]:
        """Return the hosts whose executors run tasks of a tagged job and are decommissioned."""
        executors = {(task.host(), task.executorId()) for task in self._tasks(tag, "RUNNING")}
        state = self._scala.taskScheduler().getExecutorDecommissionState
        return sorted({host for host, executor in executors if state(executor).isDefined()})

    def _tasks(self, tag: str, status: str) -> Iterator[Any]:
        """Yield Spark's data about the tasks with a status in the jobs with a tag."""
        store = self._scala.statusStore()
        for stage in (stage for job in self.jobs(tag) for stage in self._stages(job)):
            tasks = store.taskList(stage, store.lastStageAttempt(stage).attemptId(), 2**31 - 1)
            for task in (tasks.apply(i) for i in range(tasks.size())):
                if task.status() == status:
                    yield task

    def _stages(self, job: int) -> list[int]:
        return list(getattr(self.context.statusTracker().getJobInfo(job), "stageIds", ()))

    @property
    def _scala(self) -> Any:
        """The application's SparkContext in the JVM."""
        return self.context._jsc.sc()
