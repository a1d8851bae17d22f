"""Helpers for tests of processes: wait for a condition, and look at processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def wait_until(condition: Callable[[], Any], seconds: float | None = None) -> None:
    """Wait for a condition, for some seconds. Default: 60 times HVD_TEST_PATIENCE."""
    if seconds is None:
        seconds = 60 * float(os.environ.get("HVD_TEST_PATIENCE", "1"))
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Return whether a process has ended or is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids(path: Path) -> list[int]:
    """Wait for a file of process ids and return the ids."""
    wait_until(path.exists)
    return [int(pid) for pid in path.read_text().split()]
