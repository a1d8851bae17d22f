"""How long the tasks of a job wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GLOO_TIMEOUT", "Patience"]

GLOO_TIMEOUT = "120"
"""Seconds that ranks wait for each other within Gloo, unless the user says otherwise.

Horovod's 30 s are less than what TCP takes to go on after a link was down for 25 s: it tries after
pauses that double, so twice as long. A task that is lost is told of well before these.
"""


@dataclass(frozen=True)
class Patience:
    """Seconds that a rank's task waits for another one.

    Attributes
    ----------
    attempt : float
        For the answer to a message, before it is sent again.
    refused : float
        While connections are refused: nobody listens any more.
    silence : float
        While there is no answer at all: a link is down, or a process is stopped.
    pause : float
        Between two attempts.
    beat : float
        Between two messages that say that a task is alive.
    """

    attempt: float = 5.0
    refused: float = 15.0
    silence: float = 60.0
    pause: float = 0.2
    beat: float = 1.0
