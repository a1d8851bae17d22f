"""The Spark application that launches ranks: slots, hosts, Python, and failures of jobs and tasks.

All of it is asked here, so that a session of another kind (`hvd_estimators.launch.cluster.connect`)
needs another class with these methods and nothing else. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import InheritableThread

from hvd_estimators._util.spark_session import current_session
from hvd_estimators.exceptions import DependencyError
from hvd_estimators.launch.cluster.resources import collect_from_tasks
from hvd_estimators.launch.task.spec import broadcast
from hvd_estimators.launch.versions import installed_versions

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.resources import Task

__all__ = ["DYNAMIC_ALLOCATION", "Cluster", "FailedTask", "await_slots", "expected_executors"]

logger = logging.getLogger(__name__)


_POLL_SECONDS = 0.2


# Executors register within seconds of each other; the first may take long.
_SETTLED_SECONDS = 10.0


# Where more are needed, and nobody knows how many will come.
_LATE_SECONDS = 60.0


def await_slots(cluster: Cluster, wanted: int | None, timeout: float) -> int:
    """Return the task slots, once there are enough or no more executors will come.

    Parameters
    ----------
    cluster : Cluster
        The application.
    wanted : int or None
        How many are enough; None asks for all of them.
    timeout : float
        Seconds to wait at most.
    """
    started = time.monotonic()
    patience = _SETTLED_SECONDS if wanted is None else _LATE_SECONDS
    # Executors of an application that has been there for a while have registered.
    last_change = started - cluster.age
    expected = expected_executors(cluster.master, cluster.conf)
    told = False
    slots = cluster.task_slots()
    while wanted is None or slots < wanted:
        now = time.monotonic()
        if expected is not None and cluster.executors() >= expected:
            slots = cluster.task_slots()
            break
        if now - started >= timeout:
            break
        # With executors and no slots these lack what tasks ask for.
        is_there = slots or cluster.executors()
        if expected is None and is_there and now - last_change > patience:
            break
        if wanted is not None and not told and now - started > _SETTLED_SECONDS:
            told = True
            logger.warning(
                "Waiting for executors: the cluster has %d task slots, and %d are needed. After "
                "%g seconds (start_timeout) this is an error.",
                *(slots, wanted, timeout),
            )
        time.sleep(_POLL_SECONDS)
        before, slots = slots, cluster.task_slots()
        last_change = now if slots != before else last_change
    return slots


def expected_executors(master: str, conf: dict[str, str]) -> int | None:
    """Return how many executors an application of a fixed size gets; None if nobody knows.

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


# A result that is collected is in the JVM as what the task sent, as rows, and pickled for Python.
_COPIES_OF_RESULTS = 6


DYNAMIC_ALLOCATION = "spark.dynamicAllocation.enabled"


"""The setting with which executors come and go with the work."""


_PROPERTIES = ("spark.job.tags", "spark.job.description", "spark.job.interruptOnCancel")


# Blocks in which Spark takes barrier jobs although executors come and go.
_accepting = 0


_lock = threading.Lock()


@dataclass(frozen=True, order=True)
class FailedTask:
    """A task that has failed.

    Attributes
    ----------
    ended : int
        When, in milliseconds since the epoch.
    host : str
        The machine that it ran on.
    executor : str
        Spark's name of the executor.
    """

    ended: int
    host: str
    executor: str


class Cluster:
    """A Spark application with a driver of its own, as the one that this process runs.

    Parameters
    ----------
    context : SparkContext
        The application.
    profile : ResourceProfile, optional
        What tasks ask for, as the application knows it. Default: what its settings say.
    session : SparkSession, optional
        The session in which jobs run. Default: `current_session`.
    """

    knows_slots: bool = True
    """Whether `task_slots` is a number that holds."""

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
        """The application's id: another one after a restart of Spark."""
        return str(self.context.applicationId)

    @property
    def master(self) -> str:
        """Spark's master URL."""
        return str(self.context.master)

    @cached_property
    def conf(self) -> dict[str, str]:
        """Spark's configuration."""
        return dict(self.context.getConf().getAll())

    @property
    def is_local(self) -> bool:
        """Whether tasks run in the driver's own process."""
        return self.master.split("[")[0] == "local"

    @property
    def allocates_dynamically(self) -> bool:
        """Whether executors come and go with the work; never where Spark is local."""
        is_set = self.conf.get(DYNAMIC_ALLOCATION, "false").lower() == "true" or _accepting > 0
        return is_set and not self.is_local

    @contextlib.contextmanager
    def accepting_barrier_jobs(self) -> Iterator[None]:
        """Let Spark take barrier jobs until the block ends, with dynamic allocation, too.

        It refuses them because it would not ask for their executors; they have to be there already.
        Only that refusal looks at the setting once the application has started.
        """
        global _accepting
        if not self.allocates_dynamically:
            yield
            return
        conf = self._scala.conf()
        with _lock:
            _accepting += 1
            conf.set(DYNAMIC_ALLOCATION, "false")
        try:
            yield
        finally:
            with _lock:
                _accepting -= 1
                if not _accepting:
                    conf.set(DYNAMIC_ALLOCATION, "true")

    @property
    def age(self) -> float:
        """Seconds since the application has started."""
        return max(time.time() - self.context.startTime / 1000, 0)

    def driver_host(self) -> str:
        """Return the address at which executors reach the driver."""
        return "127.0.0.1" if self.is_local else self.conf.get("spark.driver.host", "127.0.0.1")

    def task_slots(self) -> int:
        """Return how many tasks the executors that are registered can run at the same time."""
        manager = self._scala.resourceProfileManager()
        if self.profile is None:
            profile = manager.defaultResourceProfile()
        else:
            profile = manager.resourceProfileFromId(self.profile.id)
        return int(self._scala.maxNumConcurrentTasks(profile))

    def executors(self) -> int:
        """Return how many executors have registered."""
        # The driver is among them.
        return int(self._scala.getExecutorMemoryStatus().size()) - 1

    def collectable_bytes(self) -> int:
        """Return how many bytes of results the driver's JVM can collect."""
        jvm: Any = self.context._jvm
        limit = int(jvm.java.lang.Runtime.getRuntime().maxMemory()) // _COPIES_OF_RESULTS
        given = self._scala.conf().getSizeAsBytes("spark.driver.maxResultSize", "1g")
        # What Spark counts is somewhat more than what a rank returned.
        return min(limit, int(given * 0.9) if given > 0 else limit)

    def check_python(self) -> None:
        """Make sure that executors on this machine run this environment's Python.

        Raises
        ------
        DependencyError
            If they run another one: it lacks the packages that are installed here.
        """
        python = self.context.pythonExec
        if not self.is_local or python == sys.executable:
            return
        try:
            found = subprocess.run(
                [python, "-c", "import sys; print(sys.prefix)"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip()
        except OSError as error:
            raise DependencyError(
                f"Spark is to run {python!r} for its Python tasks, which does not start: "
                f"{error.strerror}. Set PYSPARK_PYTHON={sys.executable} in the environment before "
                "the Spark session is made."
            ) from error
        if found != sys.prefix:
            raise DependencyError(
                f"Spark runs {python!r} ({found or 'which does not start'}) for its Python tasks, "
                f"not this Python ({sys.executable}). Set PYSPARK_PYTHON={sys.executable} in the "
                "environment before the Spark session is made."
            )

    def installed_versions(self) -> dict[str, str]:
        """Return what is installed here and has to be the same where ranks run."""
        return {} if self.is_local else installed_versions()

    @contextlib.contextmanager
    def tagged(self, tags: Sequence[str], description: str | None, ranks: bool) -> Iterator[None]:
        """Give the jobs of the block tags, beside the thread's job group and other properties.

        Parameters
        ----------
        tags : sequence of str
            The tags.
        description : str or None
            Shown by Spark unless the thread has set one.
        ranks : bool
            Whether tasks are interrupted when they are cancelled. HDFS may take an interrupt of a
            task that writes for the failure of a node.
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
                    # None removes a property, which the type hints do not know.
                    context.setLocalProperty(name, value)  # type: ignore[arg-type]

    def cancel(self, tag: str) -> None:
        """Cancel the jobs that have a tag."""
        self.context.cancelJobsWithTag(tag)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a thread whose jobs have this thread's job group and tags."""
        return InheritableThread(target=target, daemon=True)

    def shared(self, call: bytes) -> contextlib.AbstractContextManager[bytes | Broadcast[bytes]]:
        """Yield a call as the tasks of the block's jobs get it."""
        return broadcast(self.context, call)

    def collect(self, num_tasks: int, task: Task, schema: str) -> list[Any]:
        """Run a barrier job; return the rows of its tasks, see `collect_from_tasks`."""
        session = self._session or current_session()
        return collect_from_tasks(session, num_tasks, task, schema, self.profile)

    def started_tasks(self, tag: str) -> int:
        """Return how many tasks of the jobs that have a tag have begun."""
        return self.active_tasks(self.jobs(tag), ended=True)

    def slots_beside(self, tag: str, others: str) -> int | None:
        """Return the task slots that jobs with a tag leave to one of them; None where they all are.

        Parameters
        ----------
        tag : str
            A tag of that one alone.
        others : str
            A tag of all of them.
        """
        held = self.active_tasks((self.active_jobs() & self.jobs(others)) - self.jobs(tag))
        return self.task_slots() - held if held else None

    def jobs(self, tag: str) -> set[int]:
        """Return the ids of the jobs that have a tag."""
        # PySpark's own status tracker knows groups only.
        return set(self._scala.statusTracker().getJobIdsForTag(tag))

    def active_jobs(self) -> set[int]:
        """Return the ids of the jobs that run or wait."""
        return set(self.context.statusTracker().getActiveJobsIds())

    def active_tasks(self, jobs: set[int], ended: bool = False) -> int:
        """Return how many tasks of some jobs run; or, with ``end_note``, run or have run."""
        wanted = {stage for job in jobs for stage in self._stages(job)}
        # PySpark's own status tracker learns of tasks that have started with the next event only.
        stages = self._scala.statusStore().activeStages()
        active = 0
        for stage in (stages.apply(i) for i in range(stages.size())):
            if stage.stageId() in wanted:
                active += stage.numActiveTasks() + (stage.numCompleteTasks() if ended else 0)
        return active

    def failed_tasks(self, tag: str) -> list[FailedTask] | None:
        """Return the tasks that have failed of the jobs that have a tag; None if nobody knows."""
        store = self._scala.statusStore()
        found = []
        for stage in (stage for job in self.jobs(tag) for stage in self._stages(job)):
            tasks = store.taskList(stage, store.lastStageAttempt(stage).attemptId(), 2**31 - 1)
            for task in (tasks.apply(i) for i in range(tasks.size())):
                if task.status() == "FAILED":
                    took = task.duration()
                    ended = task.launchTime().getTime() + (took.get() if took.isDefined() else 0)
                    found.append(FailedTask(ended, task.host(), task.executorId()))
        return found

    def _stages(self, job: int) -> list[int]:
        return list(getattr(self.context.statusTracker().getJobInfo(job), "stageIds", ()))

    @property
    def _scala(self) -> Any:
        """The application's own SparkContext, in the JVM."""
        return self.context._jsc.sc()
