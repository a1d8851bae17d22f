"""Entry points of the Spark barrier tasks that run ranks.

A warm process imports the modules of its forked ranks for a second or more. So it starts before the
task's own imports, which take some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch.service.stages import Stage
from hvd_estimators.launch.task.environment import prepare_warm_start, stage_reporter

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_estimators.launch.task.spec import Job

__all__ = ["import_task", "run_task"]


def run_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    for _ in batches:
        pass
    stages = stage_reporter(job)
    try:
        stages.enter(Stage.IMPORTS)
        prepare_warm_start(job)
        from hvd_estimators.launch.task.run import run_rank

        yield from run_rank(job, stages)
    finally:
        stages.close()


def import_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Let this executor import the modules of forked ranks. Runs in a barrier task."""
    for _ in batches:
        pass
    prepare_warm_start(job)
    yield from ()
