"""Clock that only waiting moves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


class FakeClock:
    """The `time` of one module, in which sleeping takes no time.

    Other modules and their threads keep the real clock. Had a test replaced `time.sleep` itself, a
    thread that an earlier test left would loop without a pause, and move the clock.

    Attributes
    ----------
    waits : list of float
        Seconds of all waits.
    now : float
        Current time, in seconds.
    """

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the current time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.waits.append(seconds)
        self.now += seconds


def set_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType | Any) -> FakeClock:
    """Give a module, which has imported `time`, a clock of its own."""
    clock = FakeClock()
    monkeypatch.setattr(module, "time", clock)
    return clock
