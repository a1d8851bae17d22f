"""Cleanup of stores at interpreter exit, while stores are still reachable."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import threading
from collections.abc import Callable

from hvd_estimators.store import retries

__all__ = ["at_exit"]

_RETRY_SECONDS = 3.0
"""Maximum seconds of retries for a failing store at interpreter exit."""


def at_exit(function: Callable[[], None]) -> None:
    """Call a function at interpreter exit. The function may be called twice.

    The standard library's `atexit` functions run after the interpreter has stopped allowing new
    threads. From then on, fsspec's filesystems cannot resolve host names. They would fail if their
    connections had been idle for some seconds, and retry for a minute.
    """

    def call() -> None:
        # The shorter limit also applies to retries that are running in other threads.
        retries.RETRY_SECONDS = min(retries.RETRY_SECONDS, _RETRY_SECONDS)
        function()

    # The most recently registered function runs first. This one must run before the function that
    # joins the threads, which `concurrent.futures.thread` registers when it is imported.
    threading._register_atexit(call)  # type: ignore[attr-defined]
    # For interpreters that exit without joining threads.
    atexit.register(call)
