"""Timeouts of tasks and ranks that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GLOO_TIMEOUT", "Patience"]

GLOO_TIMEOUT = "120"
"""Seconds for which ranks wait for each other within Gloo, unless the user sets another value.

Horovod's default of 30 s is too short. After a link was down for 25 s, TCP may take twice as long
to resume, because the pauses between its attempts double. A lost task is reported well before this
timeout.
"""


@dataclass(frozen=True)
class Patience:
    """Timeouts, in seconds, of a rank's task that waits for another task.

    Attributes
    ----------
    attempt : float
        Time to wait for the answer to a message before it is sent again.
    refused : float
        Time to retry while connections are refused, because the other task no longer listens.
    silence : float
        Time to retry without any answer, because a link is down or a process is stopped.
    pause : float
        Pause between two attempts.
    beat : float
        Interval between two heartbeats of a task.
    """

    attempt: float = 5.0
    refused: float = 15.0
    silence: float = 60.0
    pause: float = 0.2
    beat: float = 1.0
