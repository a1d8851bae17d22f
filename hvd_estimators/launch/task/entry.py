"""Entry points of the Spark barrier tasks that run ranks.

A warm process imports the modules of its forked ranks for a second or more. So it starts before the
task's own imports, which take some tenths of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch.task.settings import TaskSettings, task_environment, warm_start

if TYPE_CHECKING:
    import pyarrow as pa


def run_task(
    batches: Iterator[pa.RecordBatch], *, settings: TaskSettings
) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    for _ in batches:
        pass
    _prepare_warm_start(settings)
    from hvd_estimators.launch.task.run import run_rank

    yield from run_rank(settings)


def import_task(
    batches: Iterator[pa.RecordBatch], *, settings: TaskSettings
) -> Iterator[pa.RecordBatch]:
    """Let this executor import the modules of forked ranks. Runs in a barrier task."""
    for _ in batches:
        pass
    _prepare_warm_start(settings)
    yield from ()


def _prepare_warm_start(settings: TaskSettings) -> None:
    """Start the process that imports the modules of forked ranks, if ranks are forked."""
    start = warm_start(settings)
    if start is not None:
        start.prepare(settings.executable or sys.executable, task_environment(settings))
