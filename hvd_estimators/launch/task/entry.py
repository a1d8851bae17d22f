"""The entry of a Spark barrier task that runs a rank.

A warm process imports for a second or more what ranks are forked with. So it is started before the
task itself imports what it needs, which takes some tenths of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch.task.run import prepare_warm_start

if TYPE_CHECKING:
    import pyarrow as pa

    from hvd_estimators.launch.task.spec import Job

__all__ = ["import_task", "run_task"]


def run_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Run one rank in a child process and yield its outcome. Runs in a barrier task."""
    for _ in batches:
        pass
    prepare_warm_start(job)
    from hvd_estimators.launch.task.run import run_rank

    yield from run_rank(job)


def import_task(batches: Iterator[pa.RecordBatch], *, job: Job) -> Iterator[pa.RecordBatch]:
    """Let this executor import what ranks are forked with. Runs in a barrier task."""
    for _ in batches:
        pass
    prepare_warm_start(job)
    yield from ()
