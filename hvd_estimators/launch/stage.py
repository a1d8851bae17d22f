"""Stages of a rank's launch, and their explanations. ``service/launch_watch.py`` watches them."""

from __future__ import annotations

import enum


class Stage(enum.IntEnum):
    """Stage that a rank's launch has reached, in the order of a launch."""

    WAITING = 0
    STARTED = 1  # service/exchange.py
    CONNECTED = 2  # task/run.py
    FUNCTION = 3  # rank/process.py

    @property
    def label(self) -> str:
        """The stage's name in messages."""
        return "in the function" if self is Stage.FUNCTION else self.name.lower()


EXPLANATIONS = {
    Stage.WAITING: (
        "Spark has not started the task, because other jobs hold the task slots; or its Python has "
        "not started, is still checking its machine, or cannot reach the driver"
    ),
    Stage.STARTED: (
        "the task connects to the task of rank 0; a firewall may be between the hosts, or nics "
        "must be set"
    ),
    Stage.CONNECTED: (
        "the rank's process has not called its function yet; its Python starts, or it imports the "
        "modules that the function needs"
    ),
}
"""Explanation of each stage in messages: the cause of the wait."""
