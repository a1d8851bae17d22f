"""How the tasks of a barrier job tell each other of themselves. Runs in the tasks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.job import Job

__all__ = ["exchange"]


def exchange(context: BarrierTaskContext, job: Job, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Give every task what all tasks have to say, in the order of the tasks.

    Every task of the job calls it, equally often, and waits in it for all others.

    Parameters
    ----------
    context : BarrierTaskContext
        This task's.
    job : Job
        What every task got from the driver.
    mine : dict
        What this task says: values that JSON knows.
    """
    return [json.loads(text) for text in context.allGather(json.dumps(mine))]
