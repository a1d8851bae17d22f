"""Launches over Spark Connect, and the choice between Connect and classic sessions.

Runs on the driver, which is the Connect client's process here. A classic session asks the JVM. Here
the same facts come from the application's settings or from the tasks, or stay unknown.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import InheritableThread
from pyspark.errors import PySparkException

from hvd_estimators._util.spark_session import current_session, is_connect
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.exceptions import DependencyError, SlotsError
from hvd_estimators.launch.cluster.application import (
    DYNAMIC_ALLOCATION,
    Cluster,
    expected_executors,
)
from hvd_estimators.launch.cluster.resources import TaskResources
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.task.addresses import route_address
from hvd_estimators.launch.task.host_checks import installed_versions
from hvd_estimators.launch.task.settings import INLINE_BYTES, AddedFile

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.resources import Task, TaskResources

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


# Settings to request: a client cannot get all settings at once.
_SETTINGS = (
    *("spark.app.id", "spark.master", "spark.task.cpus", "spark.task.resource.gpu.amount"),
    *("spark.executor.instances", "spark.executor.cores", "spark.cores.max", DYNAMIC_ALLOCATION),
    *("spark.executor.resource.gpu.amount", "spark.dynamicAllocation.maxExecutors"),
    "spark.driver.maxResultSize",
)


class ConnectCluster(Cluster):
    """Spark application that this process accesses over Spark Connect.

    Parameters
    ----------
    session : SparkSession
        The client's session.
    resources : TaskResources, optional
        Resources that tasks request.
    """

    def __init__(self, session: SparkSession, resources: TaskResources | None = None) -> None:
        self._session: Any = session
        self._resources = resources or TaskResources()
        self._started: dict[str, int] = {}

    @cached_property
    def profile(self) -> ResourceProfile | None:  # type: ignore[override]
        """Resources that tasks request; None for the application's settings."""
        return self._resources.built()

    @property
    def application(self) -> str:
        """The application's id, which changes with a restart of the server."""
        return self._setting("spark.app.id")

    @property
    def master(self) -> str:
        """Spark's master URL."""
        return self._setting("spark.master")

    @cached_property
    def conf(self) -> dict[str, str]:
        """The application's settings that launching uses."""
        settings = {}
        for name in _SETTINGS:
            # Managed servers answer some names with an error.
            with contextlib.suppress(PySparkException):
                settings[name] = self._session.conf.get(name, None)
        return {name: str(value) for name, value in settings.items() if value is not None}

    def _setting(self, name: str) -> str:
        if name not in self.conf:
            raise DependencyError(
                f"The Spark Connect server does not show the setting {name}, as a managed or "
                "serverless service may not. Launching ranks there is not supported. Use a cluster "
                "with executors of your own, or train on this machine with "
                "backend=LocalBackend(num_proc)."
            )
        return self.conf[name]

    @property
    def is_local(self) -> bool:
        """True if tasks run on this machine, in the server's own process."""
        return self.master.split("[")[0] == "local" and self._server() in _LOOPBACK

    @property
    def allocates_dynamically(self) -> bool:
        """False, because dynamic allocation cannot be controlled over Spark Connect."""
        return False

    @contextlib.contextmanager
    def accepting_barrier_jobs(self) -> Iterator[Callable[[str], None]]:
        """Do nothing, except raise `SlotsError` if Spark rejects barrier jobs."""
        if (
            self.conf.get(DYNAMIC_ALLOCATION, "false").lower() == "true"
            and "local" not in self.master
        ):
            raise SlotsError(
                "The Spark Connect server has spark.dynamicAllocation.enabled=true, with which "
                "Spark rejects jobs whose tasks start together. Start it with false, or use a "
                "session that is not one of Spark Connect."
            )
        yield lambda tag: None

    @property
    def age(self) -> float:
        """Infinite, because the time that executors have had to register is unknown."""
        return float("inf")

    def driver_host(self) -> str:
        """Return the address at which executors can probably reach this process."""
        if self.is_local:
            return LOOPBACK
        return route_address(self._server()) or socket.gethostname()

    @property
    def knows_slots(self) -> bool:  # type: ignore[override]
        """True if the settings determine the number of task slots."""
        return self._slots is not None

    def task_slots(self) -> int:
        """Return the number of concurrent tasks according to the settings; 0 if unknown."""
        return self._slots or 0

    @cached_property
    def _slots(self) -> int | None:
        cores = self._cores()
        if cores is None or self._resources.resource_profile is not None:
            return None
        each = self._resources.cpus_per_task or int(self.conf.get("spark.task.cpus", "1"))
        return cores // each

    def _cores(self) -> int | None:
        """Return the cores of all executors, or None if the settings do not determine them."""
        master, conf = self.master, self.conf
        local = re.fullmatch(r"local(?:\[\s*(\d+|\*)\s*(?:,.*)?\])?", master)
        if local:
            return self._local_cores() if local[1] == "*" else int(local[1] or 1)
        cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
        if cluster:
            return int(cluster[1]) * int(cluster[2])
        if conf.get("spark.cores.max"):
            return int(conf["spark.cores.max"])
        executors = expected_executors(master, conf)
        default = "1" if master == "yarn" or master.startswith("k8s") else None
        each = conf.get("spark.executor.cores", default)
        return None if executors is None or each is None else executors * int(each)

    def _local_cores(self) -> int:
        rows = self._session.range(1).mapInArrow(_count_cores, "cores int").collect()
        return int(rows[0]["cores"])

    def executors(self) -> int:
        """Return the expected number of executors according to the settings; 0 if unknown."""
        return expected_executors(self.master, self.conf) or 0

    def collectable_bytes(self) -> int:
        """Return the maximum size of results, in bytes, that the server collects."""
        given = self.conf.get("spark.driver.maxResultSize", "1g").strip().lower()
        size = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", given)
        most = int(size[1]) * _UNITS[size[2]] if size else 2**30
        return int(most * 0.9) or 2**62

    def installed_versions(self) -> dict[str, str]:
        """Return the versions installed here, because the server may run another Python."""
        return installed_versions()

    @contextlib.contextmanager
    def tagged(self, tags: Sequence[str], description: str | None, ranks: bool) -> Iterator[None]:
        """Tag the block's operations; see `Cluster.tagged`."""
        for tag in tags:
            self._session.addTag(tag)
        try:
            yield
        finally:
            for tag in tags:
                self._session.removeTag(tag)

    def cancel(self, tag: str) -> None:
        """Interrupt the operations with a tag."""
        self._session.interruptTag(tag)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a thread whose operations have this thread's tags."""
        given: Any = {"target": target, "session": self._session}
        thread: threading.Thread = InheritableThread(**given)
        thread.daemon = True
        return thread

    @contextlib.contextmanager
    def shared(self, call: bytes) -> Iterator[Any]:
        """Yield a call in the form that tasks receive; a large call is a file of the session."""
        if len(call) <= INLINE_BYTES:
            yield call
            return
        name = f"hvd_estimators-{uuid.uuid4().hex}"
        with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
            path = os.path.join(folder, name)
            with open(path, "wb") as file:
                file.write(call)
            self._session.addArtifact(path, file=True)
        yield AddedFile(name)

    def collect(
        self, num_tasks: int, task: Task, schema: str, *, barrier: bool = True
    ) -> list[Any]:
        """Run a job and return the rows of its tasks; see `collect_from_tasks`."""
        own_thread, tags = threading.get_ident(), set(self._session.getTags())

        def note(stages: Any, inflight_tasks: int, *_: Any, **__: Any) -> None:
            # Called for every operation of the session, by the thread that waits for it.
            if threading.get_ident() == own_thread:
                started = inflight_tasks + sum(stage.num_completed_tasks for stage in stages or ())
                self._started.update(dict.fromkeys(tags, started))

        self._session.registerProgressHandler(note)
        try:
            return super().collect(num_tasks, task, schema, barrier=barrier)
        finally:
            self._session.removeProgressHandler(note)

    def started_tasks(self, tag: str) -> int:
        """Return the number of tasks that have started in the job with a tag."""
        return self._started.get(tag, 0)

    def slots_beside(self, tag: str, shared_tag: str) -> int | None:
        """Return None: the task slots that other jobs hold are unknown."""
        return None

    def failed_tasks(self, tag: str) -> None:
        """Return None: the machines of failed tasks are unknown, and stay so."""

    def running_tasks(self, tag: str) -> dict[int, str]:
        """Return the tasks that have started in the job with a tag, on unknown machines."""
        # A barrier job starts all of its tasks at once.
        return dict.fromkeys(range(self.started_tasks(tag)), "")

    def _server(self) -> str:
        return str(self._session.client.host)


def _count_cores(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the number of cores. Runs in a task."""
    import pyarrow as pa

    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"cores": pa.array([os.cpu_count()], pa.int32())})


def current_cluster(resources: TaskResources | None = None) -> Cluster:
    """Return the application of `current_session`.

    Parameters
    ----------
    resources : TaskResources, optional
        Resources that tasks request.

    Raises
    ------
    SlotsError
        If the cluster manager does not have these resources.
    """
    session = current_session()
    if is_connect(session):
        return ConnectCluster(session, resources)
    context = session.sparkContext
    return Cluster(context, None if resources is None else resources.on(context), session)
