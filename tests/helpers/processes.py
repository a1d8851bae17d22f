"""Helpers for tests of processes and threads: start them, wait for them and look at them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, and return its result as a future."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


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
