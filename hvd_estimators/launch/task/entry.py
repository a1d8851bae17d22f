"""Entry points of the Spark barrier tasks that run ranks.

A warm process imports the modules of its forked ranks for a second or more. So it starts before the
task's own imports, which take some tenths of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch.task.job import Job, task_environment, warm_start

if TYPE_CHECKING:
    import pyarrow as pa


def run_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    for _ in batches:
        pass
    _prepare_warm_start(job)
    from hvd_estimators.launch.task.run import run_rank

    yield from run_rank(job)


def import_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Let this executor import the modules of forked ranks. Runs in a barrier task."""
    for _ in batches:
        pass
    _prepare_warm_start(job)
    yield from ()


def _prepare_warm_start(job: Job) -> None:
    """Start the process that imports the modules of forked ranks, if ranks are forked."""
    start = warm_start(job)
    if start is not None:
        start.prepare(job.executable or sys.executable, task_environment(job))
