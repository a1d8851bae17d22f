"""A backend for tests that need no rank processes."""

from __future__ import annotations

import threading
from typing import Any


class InProcessBackend:
    """Backend that calls the function here, once per rank; concurrent fits take turns.

    Like a user's own backend, it is not derived from this package's `Backend`.
    """

    _lock = threading.Lock()

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        """Call the function as each rank would."""
        with self._lock:
            return [fn(*args, **(kwargs or {})) for _ in range(self.ranks)]

    def num_processes(self) -> int:
        """Return the number of calls."""
        return self.ranks
