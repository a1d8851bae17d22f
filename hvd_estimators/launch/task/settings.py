"""Settings of a job, sent from the driver to the tasks, and the environment of their ranks.

`hvd_estimators.launch.task.entry` imports this module before anything else of a task, so it must
import little.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import Broadcast, SparkFiles

from hvd_estimators._util.import_path import python_path
from hvd_estimators.launch.rank.environment import DEFAULTS, child_environment, local_environment
from hvd_estimators.launch.service.server import SERVICE_VARIABLE
from hvd_estimators.launch.warm.client import WarmStart, allows_warm_start

if TYPE_CHECKING:
    from pyspark import SparkContext


@dataclass(frozen=True)
class TaskSettings:
    """Settings that every task needs.

    Attributes
    ----------
    one_machine : bool
        Whether all tasks are known to run on one machine.
    call : bytes, Broadcast or AddedFile
        Result of `pickle_call`.
    max_bytes : int
        Maximum size of an outcome.
    secret : bytes
        Secret with which tasks prove to each other that they belong to this job.
    service : str
        Address of the driver's service; empty if the job runs no ranks.
    streams : tuple of str
        Streams whose lines the driver receives; an empty name means both streams as one.
    separate_streams : bool
        Whether ranks have a separate pipe for each stream.
    modules : tuple of str or None
        Modules to import in a process that forks ranks; None starts each rank in a fresh process.
    exchanges_over_driver : bool
        Whether the driver's service has an `ExchangeServer`.
    nics : tuple of str
        Names of the network interfaces to use; empty means any.
    inherits : bool
        Whether executors have inherited the driver's environment, as with ``local-cluster``.
    rank_logs : bytes or None
        Pickle of the `RankLogs` that tasks write, if any. Importing a store takes some time.
    """

    one_machine: bool
    driver_env: dict[str, str] = field(repr=False)
    env: dict[str, str | None] = field(repr=False)
    driver_path: tuple[str, ...]
    executable: str | None
    verbose: int
    call: bytes | Broadcast[bytes] | AddedFile = field(default=b"", repr=False)
    max_bytes: int = 0
    secret: bytes = field(default=b"", repr=False)
    service: str = field(default="", repr=False)
    streams: tuple[str, ...] = ()
    separate_streams: bool = False
    modules: tuple[str, ...] | None = None
    exchanges_over_driver: bool = False
    nics: tuple[str, ...] = ()
    inherits: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    rank_logs: bytes | None = field(default=None, repr=False)


# Well below the size at which PySpark turns a function into a broadcast variable.
INLINE_BYTES = 2**19
"""Maximum size, in bytes, of a call that is sent with the job itself."""


@dataclass(frozen=True)
class AddedFile:
    """File added to a Spark Connect session, as tasks receive it.

    Attributes
    ----------
    name : str
        The file's name.
    """

    name: str

    @property
    def value(self) -> bytes:
        """The file's content. Runs in a task."""
        return Path(SparkFiles.get(self.name)).read_bytes()


@contextlib.contextmanager
def broadcast(context: SparkContext, call: bytes) -> Iterator[bytes | Broadcast[bytes]]:
    """Yield a call in the form that tasks receive; free its disk space when the block ends.

    PySpark itself broadcasts a function above 1 MiB, whose file remains as long as the application.
    """
    if len(call) <= INLINE_BYTES:
        yield call
        return
    variable = context.broadcast(call)
    try:
        yield variable
    finally:
        variable.destroy()


def task_environment(settings: TaskSettings, *own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a rank, including the rank's own variables."""
    added = SparkFiles.getRootDirectory()
    return child_environment(
        DEFAULTS,
        local_environment(os.environ) if settings.inherits else os.environ,
        settings.driver_env,
        {"PYTHONPATH": python_path(sys.path, settings.driver_path, trusted=[added])},
        *own,
        {SERVICE_VARIABLE: settings.service or None},
        settings.env,
    )


def warm_start(settings: TaskSettings) -> WarmStart | None:
    """Return the warm start that forks this rank, or None for a fresh process."""
    env = {**os.environ, **settings.driver_env}
    if settings.modules is None or not allows_warm_start(env):
        return None
    return WarmStart.of_executor(settings.modules, env)
