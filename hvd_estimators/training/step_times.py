"""Time that a rank waits for the other ranks within its steps, reported to the driver.

Ranks wait where they average gradients. Only the difference between ranks shows the cause: a slow
rank waits least, and on a slow network all ranks wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from hvd_estimators.launch.service.events import EventSender, RankWaiting

WINDOW_SECONDS = 60.0
"""Training time between two reports of a rank."""


class _Waited:
    """Seconds that this process has waited for other ranks."""

    seconds = 0.0


def add_waiting(seconds: float) -> None:
    """Add time that this rank has waited for other ranks."""
    _Waited.seconds += seconds


class StepTimes:
    """Times of this rank's steps, reported to the driver about once per minute of training.

    Validation, checkpoints at the end of an epoch and the start of the ranks do not count.

    Parameters
    ----------
    rank : int
        This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._resumed_at: float | None = None
        self._reset()

    def resume(self) -> None:
        """Record that the steps of an epoch begin."""
        self._resumed_at = time.monotonic()
        self._waited_before = _Waited.seconds

    def pause(self) -> None:
        """Record that the steps of an epoch have ended."""
        if self._resumed_at is not None:
            self._add(time.monotonic())
            self._resumed_at = None

    def step(self) -> None:
        """Count a step, and report the window if it has ended. Cheap enough for every step."""
        if self._resumed_at is None:
            return
        self._steps += 1
        now = time.monotonic()
        if now - self._resumed_at + self._seconds < WINDOW_SECONDS:
            return
        self._add(now)
        event = RankWaiting(
            self._rank, socket.gethostname(), self._steps, self._seconds, self._waited
        )
        self._reset()
        # At most one connection per rank and minute, also of a thousand ranks.
        if int(os.environ.get("HOROVOD_SIZE", "1")) > 1:
            with contextlib.closing(EventSender()) as sender:
                sender.send(event)
        self.resume()

    def _add(self, now: float) -> None:
        assert self._resumed_at is not None
        self._seconds += now - self._resumed_at
        self._waited += _Waited.seconds - self._waited_before
        self._resumed_at, self._waited_before = now, _Waited.seconds

    def _reset(self) -> None:
        self._steps = 0
        self._seconds = self._waited = 0.0
