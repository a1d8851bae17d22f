"""What is to be done in a store when the interpreter exits, while stores can still be reached."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import threading
from collections.abc import Callable

from hvd_estimators.store import retries

__all__ = ["at_exit"]

_RETRY_SECONDS = 3.0
"""How long a store that does not answer is tried again at the end of the interpreter."""


def at_exit(function: Callable[[], None]) -> None:
    """Call a function when the interpreter exits. It may be called twice.

    Functions of the standard library's `atexit` come after the last one who may start a thread:
    from then on fsspec's filesystems cannot look up a host's name, so that they would fail where
    their connections have been idle for some seconds, and be tried again for a minute.
    """

    def call() -> None:
        # Also for what is being tried again in other threads.
        retries.RETRY_SECONDS = min(retries.RETRY_SECONDS, _RETRY_SECONDS)
        function()

    # What is registered last is called first, and that is to be before the threads' own end, which
    # their module registers when it is imported.
    threading._register_atexit(call)  # type: ignore[attr-defined]
    # For who ends without the end of threads.
    atexit.register(call)
