"""Environment of a rank in a Spark task, its warm process, and the reporter of its stages.

`entry` imports it before anything else of a task, so it must import little. Runs in the task.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark import TaskContext

from hvd_estimators.launch.rank.environment import (
    DEFAULTS,
    child_environment,
    python_path,
)
from hvd_estimators.launch.service.events import EVENTS_VARIABLE
from hvd_estimators.launch.service.stages import StageReporter
from hvd_estimators.launch.warm.client import WarmStart, allows_warm_start

if TYPE_CHECKING:
    from hvd_estimators.launch.task.spec import Job

__all__ = ["prepare_warm_start", "stage_reporter", "task_environment", "warm_start"]


def stage_reporter(job: Job) -> StageReporter:
    """Return the reporter of this task's stages."""
    context = TaskContext.get()
    assert context is not None
    return StageReporter(
        context.partitionId(),
        socket.gethostname(),
        job.events.get(EVENTS_VARIABLE),
        writes_log=not job.one_machine,
    )


def prepare_warm_start(job: Job) -> None:
    """Start the process that imports the modules of forked ranks, if ranks are forked."""
    start = warm_start(job)
    if start is not None:
        start.prepare(job.executable or sys.executable, task_environment(job))


def task_environment(job: Job, *own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a rank, including the rank's own variables."""
    return child_environment(
        DEFAULTS,
        os.environ,
        job.driver_env,
        {"PYTHONPATH": python_path(sys.path, job.driver_path)},
        *own,
        job.events,
        job.env,
    )


def warm_start(job: Job) -> WarmStart | None:
    """Return the warm start that forks this rank, or None for a fresh process."""
    if job.modules is None or not allows_warm_start({**os.environ, **job.driver_env}):
        return None
    return WarmStart.of_executor(job.modules)
