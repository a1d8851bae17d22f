"""A backend for tests of what fits have in common: its ranks are calls in this process."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["InTurnBackend"]


class InTurnBackend:
    """Calls the functions in this process, those of several threads one after the other."""

    lock = threading.Lock()

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        """Call it as the only rank would."""
        with self.lock:
            return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        """Return 1."""
        return 1
