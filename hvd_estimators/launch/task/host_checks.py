"""What a task tells the others of its machine, and what all of them find wrong with it.

Each task hears of all others before it starts its rank, so that all of them stop for the same
reason, and none waits for those that cannot start. Runs in the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import DependencyError, GpuError
from hvd_estimators.launch.gpus import (
    VISIBLE_VARIABLE,
    assigned_gpus,
    check_assignment,
    gpu_place,
    rank_gpus,
)
from hvd_estimators.launch.versions import (
    check_builds,
    differences,
    horovod_build,
    installed_versions,
    require_patches,
)

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.task.addresses import HostCandidates
    from hvd_estimators.launch.task.spec import Job

__all__ = ["check_machines", "gpu_variables", "machine_facts"]


def machine_facts(context: BarrierTaskContext, job: Job, executor: str) -> dict[str, Any]:
    """Return what the other tasks are to know, for `check_machines`: values that JSON knows.

    Parameters
    ----------
    context : BarrierTaskContext
        This task's.
    job : Job
        What every task got from the driver.
    executor : str
        What tells the task's executor from others of its host.
    """
    facts: dict[str, Any] = {}
    if job.executable is None:
        try:
            require_patches()
        except DependencyError as error:
            facts["problem"] = f"cannot be started: {error}"
        if job.versions and "problem" not in facts:
            facts["build"] = horovod_build()
            other = differences(installed_versions(), job.versions)
            if other:
                facts["problem"] = other
    if VISIBLE_VARIABLE not in job.env:  # else the user chooses, or wants none
        try:
            gpus = assigned_gpus(_addresses(context), _environment(job))
        except GpuError as error:
            facts["gpu_problem"] = str(error)
        else:
            facts.update({"gpus": gpus, "gpu_place": gpu_place(executor)} if gpus else {})
    return facts


def check_machines(
    task: int, offers: Sequence[HostCandidates], facts: Sequence[Mapping[str, Any]]
) -> str | None:
    """Make sure that the ranks can be started on all machines.

    Parameters
    ----------
    task : int
        This task.
    offers : sequence of HostCandidates
        The host of each task.
    facts : sequence of mapping
        What each task told, see `machine_facts`.

    Returns
    -------
    str or None
        What is wrong with the machine of a task: with this task's, empty if only with others'. None
        if nothing is.

    Raises
    ------
    DependencyError
        If machines have different builds of Horovod.
    GpuError
        If two tasks were assigned the same GPU, or one that its executor does not see.
    """
    problems = [of_task.get("problem") for of_task in facts]
    if any(problems):
        return problems[task] or ""
    names = [offer.name for offer in offers]
    check_builds(names, [of_task.get("build", "") for of_task in facts])
    for of_task in facts:
        if "gpu_problem" in of_task:
            raise GpuError(of_task["gpu_problem"])
    # A GPU is one of a host, whose name others may have as well.
    hosts = {offer.identity: offer.name for offer in offers}
    places = [
        (hosts[offer.identity], f"{offer.identity} {of_task.get('gpu_place', '')}")
        for offer, of_task in zip(offers, facts, strict=True)
    ]
    check_assignment(places, [of_task.get("gpus", []) for of_task in facts])
    return None


def gpu_variables(context: BarrierTaskContext, job: Job, slot: SlotInfo) -> dict[str, str]:
    """Return the variables that show a task's rank its GPUs alone."""
    addresses, env = _addresses(context), _environment(job)
    gpus = [] if VISIBLE_VARIABLE in job.env else assigned_gpus(addresses, env)
    return rank_gpus(addresses, gpus, slot.local_rank, slot.local_size, env)


def _addresses(context: BarrierTaskContext) -> list[str]:
    resources = context.resources()
    return list(resources["gpu"].addresses) if "gpu" in resources else []


def _environment(job: Job) -> dict[str, str | None]:
    """Return the executor's environment, and what the ranks get beside it."""
    return {**os.environ, **job.driver_env, **job.env}
