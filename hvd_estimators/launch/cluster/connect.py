"""Launches over Spark Connect, and the choice between Connect and classic sessions.

Runs on the driver, which is the Connect client's process here. A classic session asks the JVM. Here
the same facts come from the application's settings or from the tasks, or stay unknown.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark import InheritableThread
from pyspark.errors import PySparkException

from hvd_estimators._util.spark_session import current_session, is_connect
from hvd_estimators.exceptions import DependencyError, SlotsError
from hvd_estimators.launch.cluster.application import DYNAMIC_ALLOCATION, Cluster
from hvd_estimators.launch.cluster.resources import TaskResources
from hvd_estimators.launch.rendezvous.channel import LOOPBACK
from hvd_estimators.launch.task.addresses import route_address
from hvd_estimators.launch.task.host_checks import installed_versions

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import SparkSession

    from hvd_estimators.launch.cluster.resources import Task

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

# Settings to request: a client cannot get all settings at once.
_SETTINGS = ("spark.app.id", "spark.master", DYNAMIC_ALLOCATION)


class ConnectCluster(Cluster):
    """Spark application that this process accesses over Spark Connect.

    Parameters
    ----------
    session : SparkSession
        The client's session.
    resources : TaskResources, optional
        Resources that tasks request.
    """

    knows_slots = False

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
        return super().is_local and self._server() in _LOOPBACK

    @property
    def allocates_dynamically(self) -> bool:
        """False, because dynamic allocation cannot be controlled over Spark Connect."""
        return False

    def accept_barrier_jobs(self) -> None:
        """Do nothing, except raise `SlotsError` if Spark rejects barrier jobs."""
        is_dynamic = self.conf.get(DYNAMIC_ALLOCATION, "false").lower() == "true"
        if is_dynamic and not super().is_local:
            raise SlotsError(
                "The Spark Connect server has spark.dynamicAllocation.enabled=true, with which "
                "Spark rejects jobs whose tasks start together. Start it with false, or use a "
                "session that is not one of Spark Connect."
            )

    def driver_host(self) -> str:
        """Return the address at which executors can probably reach this process."""
        if self.is_local:
            return LOOPBACK
        return route_address(self._server()) or socket.gethostname()

    def task_slots(self) -> int:
        """Return 0, because the number is unknown."""
        return 0

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

    def _server(self) -> str:
        return str(self._session.client.host)


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
