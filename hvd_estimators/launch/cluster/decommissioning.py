"""Notice of executors that Spark decommissions while ranks run on them. Runs on the driver."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hvd_estimators.launch import timeouts

if TYPE_CHECKING:
    from hvd_estimators.launch.cluster.application import Cluster

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def watching_executors(
    cluster: Cluster, tag: str, on_notice: Callable[[], object]
) -> Iterator[None]:
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
        yield
        return
    finished = threading.Event()

    def watch() -> None:
        with contextlib.suppress(Exception):  # the context has been stopped
            while not finished.wait(timeouts.PREEMPTION_POLL):
                hosts = cluster.leaving_hosts(tag)
                if hosts:
                    logger.warning(
                        "Spark decommissions an executor on %s. The ranks are asked to save their "
                        "state and to end.",
                        ", ".join(hosts),
                    )
                    on_notice()
                    return

    threading.Thread(target=watch, name="hvd_estimators decommissioning", daemon=True).start()
    try:
        yield
    finally:
        finished.set()
