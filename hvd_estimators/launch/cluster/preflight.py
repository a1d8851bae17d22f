"""What is looked at before ranks are launched, so that what cannot work is said at once.

Runs on the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.exceptions import SlotsError
from hvd_estimators.launch.cluster.dynamic import ask_for_executors, most_slots
from hvd_estimators.launch.cluster.slots import await_slots

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster
    from hvd_estimators.launch.cluster.profiles import TaskResources

__all__ = ["check_slots"]


def check_slots(cluster: Cluster, wanted: int, timeout: float, resources: TaskResources) -> None:
    """Make sure that as many tasks as there are ranks can run at the same time.

    Parameters
    ----------
    cluster : Cluster
        The application, with what its tasks ask for.
    wanted : int
        How many.
    timeout : float
        Seconds to wait for executors at most.
    resources : TaskResources
        What each task asks for, for messages.

    Raises
    ------
    SlotsError
        If they cannot.
    """
    if not cluster.knows_slots:
        return  # Spark waits for them, and start_timeout ends that
    if cluster.allocates_dynamically:
        most = most_slots(cluster, resources)
        if most is not None and most < wanted:
            raise SlotsError(
                f"num_proc: {wanted} ranks need as many task slots at the same time, and there are "
                f"never more than {most}: spark.dynamicAllocation.maxExecutors is "
                f"{cluster.conf['spark.dynamicAllocation.maxExecutors']}. Set it higher, or "
                f"num_proc to {most} or less."
            )
        slots = ask_for_executors(cluster, wanted, timeout)
    else:
        slots = await_slots(cluster, wanted, 0 if cluster.is_local else timeout)
    if slots >= wanted:
        return
    asked = resources.describe()
    if slots == 0 and not cluster.executors() and not cluster.is_local:
        raise SlotsError(
            f"No executor has registered with the cluster (master {cluster.master}) within "
            f"{timeout:g} seconds. See its logs, or set a longer start_timeout."
        )
    if asked:
        hint = (
            "more executors, or with more for each (spark.executor.cores, "
            "spark.executor.resource.gpu.amount), or ask for less"
        )
    else:
        hint = (
            "more cores (spark.executor.instances, spark.executor.cores; for a local master the "
            "number in local[N])" + _per_task(cluster)
        )
    less = f"Set num_proc to {slots} or less, or start" if slots else "Start"
    raise SlotsError(
        f"num_proc: {wanted} ranks need as many task slots at the same time, and the cluster "
        f"(master {cluster.master}) has {slots}{f' with {asked}' if asked else ''}. {less} Spark "
        f"with {hint}."
    )


def _per_task(cluster: Cluster) -> str:
    """Return what a task asks for by the application's settings, and could ask for less."""
    cpus = cluster.conf.get("spark.task.cpus", "1")
    gpus = cluster.conf.get("spark.task.resource.gpu.amount", "0")
    text = " or with a smaller spark.task.cpus" + ("" if cpus == "1" else f", which is {cpus}")
    if float(gpus) > 0:
        text += f", or with more GPUs, of which each task takes {gpus}"
    return text
