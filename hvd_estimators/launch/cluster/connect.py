"""Launching behind Spark Connect, and the choice between both kinds of session.

Runs on the driver, which is the process of the client here. What a classic session knows from the
JVM is known from the application's settings, from the tasks themselves, or not at all.
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

from hvd_estimators._util.spark_session import current_session, is_connect
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster.application import (
    DYNAMIC_ALLOCATION,
    Cluster,
    expected_executors,
)
from hvd_estimators.launch.cluster.resources import TaskResources
from hvd_estimators.launch.task.spec import INLINE_BYTES, AddedFile
from hvd_estimators.launch.versions import installed_versions

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.resources import Task, TaskResources

__all__ = ["ConnectCluster", "current_cluster"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


# Those that are asked for: a client does not get all of them at once.
_SETTINGS = (
    *("spark.app.id", "spark.master", "spark.task.cpus", "spark.task.resource.gpu.amount"),
    *("spark.executor.instances", "spark.executor.cores", "spark.cores.max", DYNAMIC_ALLOCATION),
    *("spark.executor.resource.gpu.amount", "spark.dynamicAllocation.maxExecutors"),
    "spark.driver.maxResultSize",
)


class ConnectCluster(Cluster):
    """A Spark application that this process talks to over Spark Connect.

    Parameters
    ----------
    session : SparkSession
        The client's.
    resources : TaskResources, optional
        What tasks ask for.
    """

    def __init__(self, session: SparkSession, resources: TaskResources | None = None) -> None:
        self._session: Any = session
        self._resources = resources or TaskResources()
        self._started: dict[str, int] = {}

    @cached_property
    def profile(self) -> ResourceProfile | None:  # type: ignore[override]
        """What tasks ask for; None for what the settings say."""
        return self._resources.built()

    @property
    def application(self) -> str:
        """The application's id: another one after a restart of the server."""
        return self.conf["spark.app.id"]

    @property
    def master(self) -> str:
        """Spark's master URL."""
        return self.conf["spark.master"]

    @cached_property
    def conf(self) -> dict[str, str]:
        """Those of the application's settings that launching looks at."""
        found = {name: self._session.conf.get(name, None) for name in _SETTINGS}
        return {name: str(value) for name, value in found.items() if value is not None}

    @property
    def is_local(self) -> bool:
        """Whether tasks run on this machine, in the server's own process."""
        return self.master.split("[")[0] == "local" and self._server() in _LOOPBACK

    @property
    def allocates_dynamically(self) -> bool:
        """Whether executors come and go with the work, which nothing here can do about."""
        return False

    @contextlib.contextmanager
    def accepting_barrier_jobs(self) -> Iterator[None]:
        """Nothing; raises `SlotsError` where Spark refuses barrier jobs."""
        if (
            self.conf.get(DYNAMIC_ALLOCATION, "false").lower() == "true"
            and "local" not in self.master
        ):
            raise SlotsError(
                "The Spark Connect server has spark.dynamicAllocation.enabled=true, with which "
                "Spark refuses jobs whose tasks start together. Start it with false, or use a "
                "session that is not one of Spark Connect."
            )
        yield

    @property
    def age(self) -> float:
        """Infinite: how long executors have had to register is not known."""
        return float("inf")

    def driver_host(self) -> str:
        """Return the address at which executors may reach this process."""
        if self.is_local:
            return "127.0.0.1"
        with contextlib.suppress(OSError):
            family, kind, protocol, _, place = socket.getaddrinfo(
                self._server(), 1, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # Nothing is sent; it tells the address of the route to the server.
                probe.connect(place)
                return str(probe.getsockname()[0])
        return socket.gethostname()

    @property
    def knows_slots(self) -> bool:  # type: ignore[override]
        """Whether the settings tell the number of task slots."""
        return self._slots is not None

    def task_slots(self) -> int:
        """Return how many tasks can run at the same time by the settings; 0 where nobody knows."""
        return self._slots or 0

    @cached_property
    def _slots(self) -> int | None:
        cores = self._cores()
        if cores is None or self._resources.resource_profile is not None:
            return None
        each = self._resources.cpus_per_task or int(self.conf.get("spark.task.cpus", "1"))
        return cores // each

    def _cores(self) -> int | None:
        """Return the cores of all executors; None where the settings do not tell."""
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
        """Return how many executors there are to be, by the settings."""
        return expected_executors(self.master, self.conf) or 0

    def collectable_bytes(self) -> int:
        """Return how many bytes of results the server collects."""
        given = self.conf.get("spark.driver.maxResultSize", "1g").strip().lower()
        found = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", given)
        most = int(found[1]) * _UNITS[found[2]] if found else 2**30
        return int(most * 0.9) or 2**62

    def check_python(self) -> None:
        """Nothing: tasks say themselves what they lack."""

    def installed_versions(self) -> dict[str, str]:
        """Return what is installed here: the server's Python is never known to be this one."""
        return installed_versions()

    @contextlib.contextmanager
    def tagged(self, tags: Sequence[str], description: str | None, ranks: bool) -> Iterator[None]:
        """Give the block's operations tags; see `Cluster.tagged`."""
        for tag in tags:
            self._session.addTag(tag)
        try:
            yield
        finally:
            for tag in tags:
                self._session.removeTag(tag)

    def cancel(self, tag: str) -> None:
        """Interrupt the operations that have a tag."""
        self._session.interruptTag(tag)

    def thread(self, target: Callable[[], None]) -> threading.Thread:
        """Return a thread whose operations have this thread's tags."""
        given: Any = {"target": target, "session": self._session}
        thread: threading.Thread = InheritableThread(**given)
        thread.daemon = True
        return thread

    @contextlib.contextmanager
    def shared(self, call: bytes) -> Iterator[Any]:
        """Yield a call as tasks get it: a large one is a file of the session's."""
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

    def collect(self, num_tasks: int, task: Task, schema: str) -> list[Any]:
        """Run a barrier job; return the rows of its tasks, see `collect_from_tasks`."""
        mine, tags = threading.get_ident(), set(self._session.getTags())

        def note(stages: Any, inflight_tasks: int, *_: Any, **__: Any) -> None:
            # It is called for all operations of the session, by the thread that waits for each.
            if threading.get_ident() == mine:
                begun = inflight_tasks + sum(stage.num_completed_tasks for stage in stages or ())
                self._started.update(dict.fromkeys(tags, begun))

        self._session.registerProgressHandler(note)
        try:
            return super().collect(num_tasks, task, schema)
        finally:
            self._session.removeProgressHandler(note)

    def started_tasks(self, tag: str) -> int:
        """Return how many tasks have begun of the job that has a tag."""
        return self._started.get(tag, 0)

    def slots_beside(self, tag: str, others: str) -> int | None:
        """Return None: what other jobs hold is not known."""
        return None

    def failed_tasks(self, tag: str) -> None:
        """Return None: where tasks have failed is not known, and does not come to be."""

    def _server(self) -> str:
        return str(self._session.client.host)


def _count_cores(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield how many cores there are. Runs in a task."""
    import pyarrow as pa

    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict({"cores": pa.array([os.cpu_count()], pa.int32())})


def current_cluster(resources: TaskResources | None = None) -> Cluster:
    """Return the application of `current_session`.

    Parameters
    ----------
    resources : TaskResources, optional
        What tasks ask for.

    Raises
    ------
    SlotsError
        If the cluster manager has no such resources.
    """
    session = current_session()
    if is_connect(session):
        return ConnectCluster(session, resources)
    context = session.sparkContext
    return Cluster(context, None if resources is None else resources.on(context), session)
