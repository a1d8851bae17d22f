"""What a Spark task makes of a job for its rank: the environment, and what the rank is forked from.

Imported before anything else of a task, so that it imports little. Runs in the task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvd_estimators.launch.rank.environment import DEFAULTS, child_environment, python_path
from hvd_estimators.launch.rank.warm import WarmStart, wanted

if TYPE_CHECKING:
    from hvd_estimators.launch.task.job import Job

__all__ = ["prepare_warm_start", "task_environment", "warm_start"]


def prepare_warm_start(job: Job) -> None:
    """Let a process begin to import what ranks are forked with, if they are."""
    start = warm_start(job)
    if start is not None:
        start.prepare(job.executable or sys.executable, task_environment(job))


def task_environment(job: Job, *own: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a rank, with what is its own."""
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
    """Return how this rank is forked; None if it is to have a fresh process."""
    if job.modules is None or not wanted({**os.environ, **job.driver_env}):
        return None
    return WarmStart.of_executor(job.modules)
