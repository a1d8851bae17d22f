"""Time to finish for ranks that have something to save when they are to end.

A rank that nobody waits for any more is killed. One that asks for grace is told by SIGTERM first,
and killed when its seconds are over. It asks by a file in its directory, which its guardian and its
parent look for. The driver, which may be on another machine, is told by an event that it is worth
waiting for such a rank. Imports neither PySpark nor a framework.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "DIRECTORY_VARIABLE",
    "GRACE_VARIABLE",
    "AwaitedRanks",
    "asking_for_grace",
    "cancel_grace",
    "grace_asked",
    "grace_seconds",
    "mute_if_unheard",
]

GRACE_VARIABLE = "HVD_ESTIMATORS_GRACE_SECONDS"
"""Environment variable of ranks: how many seconds they get; 0 for none."""

DIRECTORY_VARIABLE = "HVD_ESTIMATORS_RANK_DIRECTORY"
"""Environment variable by which a rank knows its directory."""

# Schedulers that preempt leave 15 to 30 seconds, of which one to notice is gone.
_SECONDS = 15.0
_FILE = "grace"
# Spark looks every two seconds whether a task was cancelled, and ends its Python two seconds later.
_UNTIL_ASKED_SECONDS = 10.0
_SILENT_SECONDS = 0.5

logger = logging.getLogger(__name__)


def grace_seconds(env: Mapping[str, str]) -> float:
    """Return how many seconds ranks with some environment get, if they ask."""
    try:
        seconds = float(env.get(GRACE_VARIABLE, _SECONDS))
    except ValueError:
        return _SECONDS
    return seconds if 0 <= seconds < math.inf else _SECONDS


@contextlib.contextmanager
def asking_for_grace() -> Iterator[None]:
    """Have this rank told by SIGTERM, in the block, before it is killed. Runs in the rank.

    What it prints when nobody reads that any more is no error meanwhile. Does nothing in a process
    that another launcher has started.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        yield
        return
    path = Path(directory, _FILE)
    partial = path.with_suffix(".partial")
    before = sys.stdout, sys.stderr
    own: Any = tuple(map(_Forgiving, before))
    try:
        # Who looks finds all of it, or nothing. The directory goes when nobody waits any more.
        with contextlib.suppress(OSError):
            partial.write_text(str(grace_seconds(os.environ)))
            os.replace(partial, path)
        sys.stdout, sys.stderr = own
        yield
    finally:
        # Somebody else may have put others there.
        sys.stdout, sys.stderr = (
            old if now is mine else now
            for now, mine, old in zip((sys.stdout, sys.stderr), own, before, strict=True)
        )
        with contextlib.suppress(OSError):
            path.unlink()


def grace_asked(directory: str) -> float:
    """Return for how many seconds a rank asks, given its directory; 0 if it does not."""
    try:
        return float(Path(directory, _FILE).read_text())
    except (OSError, ValueError):
        return 0.0


def cancel_grace(directory: str) -> None:
    """Let a rank be killed at once, whether or not it has asked."""
    with contextlib.suppress(OSError):
        Path(directory, _FILE).unlink()


def mute_if_unheard() -> None:
    """Let what this process prints go nowhere, where nobody reads it: that would be an error."""
    for descriptor in (1, 2):
        poller = select.poll()
        poller.register(descriptor, 0)
        if any(found & (select.POLLERR | select.POLLNVAL) for _, found in poller.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


class _Forgiving:
    """A stream that takes what nobody reads: who waits for a rank may go before it is told."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(text))
        except BrokenPipeError:
            mute_if_unheard()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            mute_if_unheard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class AwaitedRanks:
    """Ranks that may have something to save when a job is interrupted. On the driver."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seconds: dict[int, float] = {}

    def add(self, key: int, seconds: float) -> None:
        """Note a rank, by any key, and for how many seconds it asks."""
        with self._changed:
            self._seconds[key] = seconds

    def discard(self, key: int) -> None:
        """Note that a rank has ended, or has nothing to save any more."""
        with self._changed:
            self._seconds.pop(key, None)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all have ended, for as long as they ask and it may take until they are told.

        Another interrupt ends the waiting.
        """
        with self._changed:
            longest = max(self._seconds.values(), default=0.0)
            if not longest or self._changed.wait_for(lambda: not self._seconds, _SILENT_SECONDS):
                return
            deadline = time.monotonic() + longest + _UNTIL_ASKED_SECONDS
            logger.warning(
                "Waiting until the ranks have saved where they are (at most %g s).", longest
            )
            if not self._changed.wait_for(lambda: not self._seconds, deadline - time.monotonic()):
                logger.warning("The ranks have not ended in time.")
