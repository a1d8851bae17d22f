"""Stages of a rank's launch, and their explanations.

Imports nothing else, because tasks import it before anything else. ``service/launch_watch.py``
watches the stages on the driver; ``rank/hang_detection.py`` is for ranks that hang later.
"""

from __future__ import annotations

import enum


class Stage(enum.IntEnum):
    """Stage of a rank's launch, in the order in which a rank enters them."""

    TASK_SLOT = 0  # service/launch_watch.py
    PYTHON_START = 1  # running_tasks() in cluster/application.py and connect.py
    IMPORTS = 2  # task/entry.py
    HOST_CHECKS = 3  # task/run.py, until PROCESS_START
    EXCHANGE = 4
    ADDRESSES = 5
    RENDEZVOUS = 6
    PROCESS_START = 7
    RANK_PROCESS = 8  # rank/process.py
    FUNCTION = 9
    HOROVOD_INIT = 10  # rendezvous/gloo_http.py, through rank/supervisor.py
    HOROVOD_JOINED = 11
    ENDED = 12  # rank/process.py

    @property
    def label(self) -> str:
        """The stage's name in messages."""
        words = self.name.lower().replace("_", " ")
        return words.replace("horovod", "Horovod").replace("python", "Python")


EXPLANATIONS = {
    Stage.TASK_SLOT: "Spark has not started the task; other jobs may hold the task slots",
    Stage.PYTHON_START: (
        "Spark has started the task, but its Python has not started, or it cannot reach the driver"
    ),
    Stage.IMPORTS: "the task imports this package",
    Stage.HOST_CHECKS: "the task checks its machine, its packages and its GPUs",
    Stage.EXCHANGE: "the task has sent its address, and waits for the other tasks' addresses",
    Stage.ADDRESSES: (
        "the task connects to the other hosts; a firewall may be between them, or nics must be set"
    ),
    Stage.RENDEZVOUS: "the task connects to the task of rank 0",
    Stage.PROCESS_START: "the task has started the rank's Python, which does not run yet",
    Stage.RANK_PROCESS: (
        "the rank's process runs, and has not called its function yet; it imports the modules that "
        "the function needs"
    ),
    Stage.FUNCTION: "the rank runs its function, and has not called hvd.init()",
    Stage.HOROVOD_INIT: "hvd.init() connects the rank to the other ranks",
}
"""Explanation of each stage in messages: the cause of the wait."""

PHASES = {
    Stage.TASK_SLOT: "waiting for task slots",
    **dict.fromkeys(
        (Stage.PYTHON_START, Stage.IMPORTS, Stage.HOST_CHECKS), "starting Python on the executors"
    ),
    **dict.fromkeys(
        (Stage.EXCHANGE, Stage.ADDRESSES, Stage.RENDEZVOUS), "connecting the executors"
    ),
    Stage.PROCESS_START: "starting processes and imports",
    Stage.RANK_PROCESS: "importing the framework",
    Stage.FUNCTION: "importing and loading the model",
    Stage.HOROVOD_INIT: "connecting the processes",
    **dict.fromkeys((Stage.HOROVOD_JOINED, Stage.ENDED), "connected, training begins"),
}
"""Work of a rank in each stage, for the display of a fit."""
