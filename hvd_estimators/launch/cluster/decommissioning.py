"""Notice of executors that Spark decommissions while ranks run on them. Runs on the driver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvd_estimators.launch.rank.preemption import polling

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster

logger = logging.getLogger(__name__)


def watching_executors(
    cluster: Cluster, tag: str, on_notice: Callable[[], object]
) -> contextlib.AbstractContextManager[None]:
    """Call a function once, if Spark decommissions an executor of a job during the block.

    Parameters
    ----------
    cluster : Cluster
        The application that runs the job.
    tag : str
        A tag that only this job has.
    on_notice : callable
        Called in another thread.
    """
    if not cluster.decommissions:
        return contextlib.nullcontext()

    def is_noticed() -> bool:
        hosts: list[str] = []
        with contextlib.suppress(Exception):  # the context has been stopped
            hosts = cluster.leaving_hosts(tag)
        if hosts:
            logger.warning(
                "Spark decommissions an executor on %s. The ranks are asked to save their state "
                "and to end.",
                ", ".join(hosts),
            )
        return bool(hosts)

    return polling(is_noticed, on_notice)
