"""Helpers for tests of rank processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
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
