"""Waits until a cluster can run as many tasks at once as are needed. Runs on the driver."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster

__all__ = ["await_slots", "expected_executors"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# Executors register within seconds of each other; the first may take long.
_SETTLED_SECONDS = 10.0
# Where more are needed, and nobody knows how many will come.
_LATE_SECONDS = 60.0


def await_slots(cluster: Cluster, wanted: int | None, timeout: float) -> int:
    """Return the task slots, once there are enough or no more executors will come.

    Parameters
    ----------
    cluster : Cluster
        The application.
    wanted : int or None
        How many are enough; None asks for all of them.
    timeout : float
        Seconds to wait at most.
    """
    started = time.monotonic()
    patience = _SETTLED_SECONDS if wanted is None else _LATE_SECONDS
    # Executors of an application that has been there for a while have registered.
    last_change = started - cluster.age
    expected = expected_executors(cluster.master, cluster.conf)
    told = False
    slots = cluster.task_slots()
    while wanted is None or slots < wanted:
        now = time.monotonic()
        if expected is not None and cluster.executors() >= expected:
            slots = cluster.task_slots()
            break
        if now - started >= timeout:
            break
        # With executors and no slots these lack what tasks ask for.
        is_there = slots or cluster.executors()
        if expected is None and is_there and now - last_change > patience:
            break
        if wanted is not None and not told and now - started > _SETTLED_SECONDS:
            told = True
            logger.warning(
                "Waiting for executors: the cluster has %d task slots, and %d are needed. After "
                "%g seconds (start_timeout) this is an error.",
                *(slots, wanted, timeout),
            )
        time.sleep(_POLL_SECONDS)
        before, slots = slots, cluster.task_slots()
        last_change = now if slots != before else last_change
    return slots


def expected_executors(master: str, conf: dict[str, str]) -> int | None:
    """Return how many executors an application of a fixed size gets; None if nobody knows.

    Parameters
    ----------
    master : str
        Spark's master URL.
    conf : dict
        Spark's configuration.
    """
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,.*\]", master)
    if cluster:
        return int(cluster[1])
    if master == "yarn" or master.startswith("k8s"):
        return int(conf.get("spark.executor.instances", 2))
    cores, per_executor = conf.get("spark.cores.max"), conf.get("spark.executor.cores")
    if master.startswith("spark:") and cores and per_executor:
        return int(cores) // int(per_executor)
    return None
