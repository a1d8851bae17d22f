"""Settings of a job, sent from the driver to the tasks, and the environment of their ranks.

`hvd_estimators.launch.task.entry` imports this module before anything else of a task, so it must
import little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark import SparkFiles

from hvd_estimators._util.import_path import python_path
from hvd_estimators.launch.rank.environment import DEFAULTS, child_environment, local_environment
from hvd_estimators.launch.service.server import SERVICE_VARIABLE
from hvd_estimators.launch.warm.client import WarmStart, allows_warm_start


@dataclass(frozen=True)
class TaskSettings:
    """Settings that every task needs.

    Attributes
    ----------
    one_machine : bool
        Whether all tasks are known to run on one machine.
    call : bytes
        Result of `pickle_call`.
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
    nics : tuple of str
        Names of the network interfaces to use; empty means any.
    inherits : bool
        Whether executors have inherited the driver's environment, as with ``local-cluster``.
    """

    one_machine: bool
    driver_env: dict[str, str] = field(repr=False)
    env: dict[str, str | None] = field(repr=False)
    driver_path: tuple[str, ...]
    executable: str | None
    verbose: int
    call: bytes = field(default=b"", repr=False)
    secret: bytes = field(default=b"", repr=False)
    service: str = field(default="", repr=False)
    streams: tuple[str, ...] = ()
    separate_streams: bool = False
    modules: tuple[str, ...] | None = None
    nics: tuple[str, ...] = ()
    inherits: bool = False
    versions: dict[str, str] = field(default_factory=dict)


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
