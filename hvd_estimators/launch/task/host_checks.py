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
from typing import TYPE_CHECKING

import hvd_estimators
from hvd_estimators.exceptions import DependencyError, GpuError
from hvd_estimators.launch.gpus import VISIBLE_VARIABLE, assigned_gpus, rank_gpus
from hvd_estimators.launch.horovod_build import installed_version

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.rank.environment import SlotInfo
    from hvd_estimators.launch.task.addresses import Host
    from hvd_estimators.launch.task.settings import TaskSettings

_PACKAGES = (
    *("cloudpickle", "horovod", "keras", "lightning", "pyarrow", "pytorch-lightning"),
    *("tensorflow", "torch"),
)


def machine_problem(context: BarrierTaskContext, settings: TaskSettings) -> list[str] | None:
    """Return why a rank cannot run in this task: the name of an error, and its text.

    Parameters
    ----------
    context : BarrierTaskContext
        Context of this task.
    settings : TaskSettings
        The driver's settings for every task.
    """
    if settings.executable is None and settings.versions:
        other = differences(installed_versions(), settings.versions)
        if other:
            return [DependencyError.__name__, other]
    try:
        _assigned(context, settings)
    except GpuError as error:
        return [GpuError.__name__, str(error)]
    return None


def check_machines(hosts: Sequence[Host], problems: Sequence[list[str] | None]) -> None:
    """Check that the ranks can be started on all machines. All tasks raise the same error.

    Parameters
    ----------
    hosts : sequence of Host
        The host of each task.
    problems : sequence
        The result of `machine_problem` in each task.

    Raises
    ------
    DependencyError
        If a machine has other packages than the driver.
    GpuError
        If a task was assigned a GPU that its executor does not see.
    """
    for host, problem in zip(hosts, problems, strict=True):
        if problem is not None:
            kind, text = problem
            if kind == GpuError.__name__:
                raise GpuError(text)
            raise DependencyError(f"A task on {host.name} {text}")


def gpu_variables(
    context: BarrierTaskContext, settings: TaskSettings, slot: SlotInfo
) -> dict[str, str]:
    """Return the variables that restrict a task's rank to its GPUs."""
    addresses, env = _addresses(context), _environment(settings)
    gpus = _assigned(context, settings)
    return rank_gpus(addresses, gpus, slot.local_rank, slot.local_size, env)


def _assigned(context: BarrierTaskContext, settings: TaskSettings) -> list[str]:
    """Return the GPUs that Spark assigned to a task; none if the user chooses or hides them."""
    if VISIBLE_VARIABLE in settings.env:
        return []
    return assigned_gpus(_addresses(context), _environment(settings))


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
