"""What launching asks of a Spark application: slots, hosts, Python, and how jobs and tasks fare.

All of it is asked here, so that a session of another kind (Spark Connect) needs another class with
these methods and nothing else. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from hvd_estimators.exceptions import DependencyError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

    from hvd_estimators.launch.profiles import TaskResources

__all__ = ["Cluster", "FailedTask"]

# A result that is collected is in the JVM as what the task sent, as rows, and pickled for Python.
_COPIES_OF_RESULTS = 6

_DYNAMIC = "spark.dynamicAllocation.enabled"
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
    """

    def __init__(self, context: SparkContext, profile: ResourceProfile | None = None) -> None:
        self.context = context
        self.profile = profile

    @classmethod
    def current(cls, resources: TaskResources | None = None) -> Cluster:
        """Return that of this thread's session, which is made if there is none.

        Parameters
        ----------
        resources : TaskResources, optional
            What tasks ask for.

        Raises
        ------
        SlotsError
            If the cluster manager has no such resources.
        """
        context = cls.session().sparkContext
        return cls(context, None if resources is None else resources.on(context))

    @staticmethod
    def session() -> SparkSession:
        """Return this thread's session, which is made if there is none."""
        return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()

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
        is_set = self.conf.get(_DYNAMIC, "false").lower() == "true" or _accepting > 0
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
            conf.set(_DYNAMIC, "false")
        try:
            yield
        finally:
            with _lock:
                _accepting -= 1
                if not _accepting:
                    conf.set(_DYNAMIC, "true")

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

    def jobs(self, tag: str) -> set[int]:
        """Return the ids of the jobs that have a tag."""
        # PySpark's own status tracker knows groups only.
        return set(self._scala.statusTracker().getJobIdsForTag(tag))

    def active_jobs(self) -> set[int]:
        """Return the ids of the jobs that run or wait."""
        return set(self.context.statusTracker().getActiveJobsIds())

    def active_tasks(self, jobs: set[int], ended: bool = False) -> int:
        """Return how many tasks of some jobs run; or, with ``ended``, run or have run."""
        wanted = {stage for job in jobs for stage in self._stages(job)}
        # PySpark's own status tracker learns of tasks that have started with the next event only.
        stages = self._scala.statusStore().activeStages()
        active = 0
        for stage in (stages.apply(i) for i in range(stages.size())):
            if stage.stageId() in wanted:
                active += stage.numActiveTasks() + (stage.numCompleteTasks() if ended else 0)
        return active

    def failed_tasks(self, tag: str) -> list[FailedTask]:
        """Return the tasks that have failed of the jobs that have a tag."""
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
