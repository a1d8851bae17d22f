"""Exchange and check of facts about the tasks' machines.

Each task receives the facts of all others before it starts its rank. So all tasks stop for the same
reason, and they do not wait for tasks that cannot start.

Versions of packages are also compared with the driver's. Ranks unpickle objects from the driver,
and the driver reads files that ranks save. Different versions fail late, with messages that do not
mention versions. Runs in the tasks, except for `installed_versions`, which the driver calls, too.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import hvd_estimators
from hvd_estimators.exceptions import DependencyError, GpuError
from hvd_estimators.launch.gpus import (
    VISIBLE_VARIABLE,
    assigned_gpus,
    check_assignment,
    gpu_place,
    rank_gpus,
)
from hvd_estimators.launch.horovod_build import (
    check_builds,
    horovod_build,
    installed_version,
    patches_problem,
)

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.rank.environment import SlotInfo
    from hvd_estimators.launch.task.addresses import HostAddresses
    from hvd_estimators.launch.task.settings import TaskSettings

_PACKAGES = (
    *("cloudpickle", "horovod", "keras", "lightning", "pyarrow", "pytorch-lightning"),
    *("tensorflow", "torch"),
)


def machine_facts(
    context: BarrierTaskContext, settings: TaskSettings, executor: str
) -> dict[str, Any]:
    """Return the facts that the other tasks need for their checks, serializable as JSON.

    Parameters
    ----------
    context : BarrierTaskContext
        Context of this task.
    settings : TaskSettings
        The driver's settings for every task.
    executor : str
        Identifier of the task's executor, unique on its host.
    """
    facts: dict[str, Any] = {}
    if settings.executable is None:
        problem = patches_problem()
        if problem:
            facts["horovod_problem"] = problem
        if settings.versions:
            facts["build"] = "" if problem else horovod_build()
            other = differences(installed_versions(), settings.versions)
            if other:
                facts["problem"] = other
    if VISIBLE_VARIABLE not in settings.env:  # else the user chooses GPUs, or hides them
        try:
            gpus = assigned_gpus(_addresses(context), _environment(settings))
        except GpuError as error:
            facts["gpu_problem"] = str(error)
        else:
            facts.update({"gpus": gpus, "gpu_place": gpu_place(executor)} if gpus else {})
    return facts


def check_machines(hosts: Sequence[HostAddresses], facts: Sequence[Mapping[str, Any]]) -> None:
    """Check that the ranks can be started on all machines. All tasks raise the same error.

    Parameters
    ----------
    hosts : sequence of HostAddresses
        The host of each task.
    facts : sequence of mapping
        The facts of each task; see `machine_facts`.

    Raises
    ------
    DependencyError
        If a machine has other packages than the driver.
    GpuError
        If two tasks were assigned the same GPU, or one that its executor does not see.
    """
    for task, (host, of_task) in enumerate(zip(hosts, facts, strict=True)):
        if "problem" in of_task:
            raise DependencyError(f"Rank {task} on {host.name} {of_task['problem']}")
    for of_task in facts:
        if "gpu_problem" in of_task:
            raise GpuError(of_task["gpu_problem"])
    # GPUs are compared within a host, by its identity: several hosts may have the same name.
    names = {host.identity: host.name for host in hosts}
    gpu_places = [
        (names[host.identity], f"{host.identity} {of_task.get('gpu_place', '')}")
        for host, of_task in zip(hosts, facts, strict=True)
    ]
    check_assignment(gpu_places, [of_task.get("gpus", []) for of_task in facts])


def horovod_problem(hosts: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason why the ranks cannot use Horovod; empty without a problem.

    Parameters
    ----------
    hosts : sequence of str
        The name of each task's host.
    facts : sequence of mapping
        The facts of each task; see `machine_facts`.
    """
    for host, of_task in zip(hosts, facts, strict=True):
        if of_task.get("horovod_problem"):
            return f"{of_task['horovod_problem']} Found on {host}."
    try:
        check_builds(hosts, [of_task.get("build", "") for of_task in facts])
    except DependencyError as error:
        return str(error)
    return ""


def gpu_variables(
    context: BarrierTaskContext, settings: TaskSettings, slot: SlotInfo
) -> dict[str, str]:
    """Return the variables that restrict a task's rank to its GPUs."""
    addresses, env = _addresses(context), _environment(settings)
    gpus = [] if VISIBLE_VARIABLE in settings.env else assigned_gpus(addresses, env)
    return rank_gpus(addresses, gpus, slot.local_rank, slot.local_size, env)


def _addresses(context: BarrierTaskContext) -> list[str]:
    resources = context.resources()
    return list(resources["gpu"].addresses) if "gpu" in resources else []


def _environment(settings: TaskSettings) -> dict[str, str | None]:
    """Return the executor's environment, updated with the ranks' variables."""
    return {**os.environ, **settings.driver_env, **settings.env}


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that must be equal on both sides.

    Build suffixes (``+cpu``) are removed, because a driver may not have GPUs.
    """
    found = {package: installed_version(package) for package in _PACKAGES}
    return {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "hvd_estimators": hvd_estimators.__version__,
        **{name: version.partition("+")[0] for name, version in found.items() if version},
    }


def differences(here: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Describe how a machine's versions differ from the driver's; empty if they match.

    A package that only one side has is ignored. Not all jobs need it, and a missing package reports
    itself.
    """
    different = [
        f"{name} {version} where the driver has {driver[name]}"
        for name, version in here.items()
        if driver.get(name, version) != version
    ]
    if not different:
        return ""
    return (
        f"has {', '.join(different)}. Install the same versions on all machines, or give executors "
        "the driver's environment (spark.archives, or PYSPARK_PYTHON with a Python that all share)."
    )
