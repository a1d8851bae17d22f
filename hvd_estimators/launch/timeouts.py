"""How long the tasks of a job wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GLOO_TIMEOUT", "Patience"]

GLOO_TIMEOUT = "120"
"""Seconds for which ranks wait for each other within Gloo, unless the user sets others.

Horovod's 30 s are too few: after a link was down for 25 s, TCP may take twice as long to go on,
since its pauses between attempts double. A lost task is reported well before this.
"""


@dataclass(frozen=True)
class Patience:
    """Seconds for which a rank's task waits for another one.

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
        Between two messages by which a task says that it is alive.
    """

    attempt: float = 5.0
    refused: float = 15.0
    silence: float = 60.0
    pause: float = 0.2
    beat: float = 1.0
