"""Calls to slow stores and servers, one after another in another thread.

The driver handles the ranks' events one by one. Calls in another thread delay neither the display
nor the ranks. Runs on the driver.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Any


class CallQueue:
    """Queue of calls that a daemon thread makes; a call that hangs delays no program's end.

    Parameters
    ----------
    name : str
        Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Queue a call, and return its end, or its exception, as a future."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread, and return whether it has ended or never started."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, call = queued
            try:
                call()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
