"""Graceful stop: a grace period for ranks that must save state before they end.

A rank that no process waits for any longer is killed. A rank that asks for grace first receives
SIGTERM, and is killed when its grace period is over. The rank asks through a file in its
directory, which its guardian and its parent read. An event notifies the driver, which may be on
another machine, that it should wait for the rank. Imports neither PySpark nor a framework.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvd_estimators._util.system import reading_end

GRACE_VARIABLE = "HVD_ESTIMATORS_GRACE_SECONDS"
"""Environment variable of ranks: the grace period in seconds; 0 disables it."""

DIRECTORY_VARIABLE = "HVD_ESTIMATORS_RANK_DIRECTORY"
"""Environment variable of ranks: the rank's directory."""

# Preempting schedulers leave 15 to 30 seconds; noticing the preemption takes one of them.
_SECONDS = 15.0
_FILE = "grace"
# Spark checks for cancelled tasks every two seconds, and ends their Python two seconds later.
_UNTIL_ASKED_SECONDS = 10.0
_SILENT_SECONDS = 0.5
# Linux reports an error for a pipe without a reader, and macOS a hang-up.
_UNHEARD = select.POLLERR | select.POLLHUP | select.POLLNVAL

_held_pipes: list[int] = []

logger = logging.getLogger(__name__)


def grace_seconds(env: Mapping[str, str]) -> float:
    """Return the grace period in seconds of a rank with the given environment."""
    try:
        seconds = float(env.get(GRACE_VARIABLE, _SECONDS))
    except ValueError:
        return _SECONDS
    return seconds if 0 <= seconds < math.inf else _SECONDS


@contextlib.contextmanager
def asking_for_grace() -> Iterator[None]:
    """Ask for SIGTERM before this rank is killed, for the duration of the block. Runs in the rank.

    Within the block, printing raises no error on Linux if no process reads the output any longer.
    Does nothing in a process that another launcher has started.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        yield
        return
    path = Path(directory, _FILE)
    partial = path.with_suffix(".partial")
    try:
        # Readers find the complete file or none. The directory may already have been deleted.
        with contextlib.suppress(OSError):
            partial.write_text(str(grace_seconds(os.environ)))
            os.replace(partial, path)
        # Until SIGTERM arrives, a pipe that this process can read breaks no print.
        _held_pipes.extend(end for end in map(reading_end, (1, 2)) if end is not None)
        yield
    finally:
        _release_pipes()
        with contextlib.suppress(OSError):
            path.unlink()


def _release_pipes() -> None:
    while _held_pipes:
        os.close(_held_pipes.pop())


# A child would seem to be a reader of its parent's output.
os.register_at_fork(after_in_child=_release_pipes)


def grace_asked(directory: str) -> float:
    """Return the seconds of grace that a rank asks for, given its directory; 0 if it does not."""
    try:
        return float(Path(directory, _FILE).read_text())
    except (OSError, ValueError):
        return 0.0


def cancel_grace(directory: str) -> None:
    """Withdraw a rank's request for grace, if any, so that the rank is killed at once."""
    with contextlib.suppress(OSError):
        Path(directory, _FILE).unlink()


def mute_if_unheard() -> None:
    """Redirect stdout and stderr to the null device if their pipes have no reader any longer.

    Writing to such a pipe would raise an error.
    """
    _release_pipes()
    for descriptor in (1, 2):
        poller = select.poll()
        poller.register(descriptor, 0)
        if any(state & _UNHEARD for _, state in poller.poll(0)):
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, descriptor)
            os.close(null_device)


class AwaitedRanks:
    """Ranks that may need to save state when a job is interrupted. Used on the driver."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seconds: dict[Any, float] = {}

    def all_keys(self) -> list[Any]:
        """Return the keys of the ranks."""
        with self._changed:
            return list(self._seconds)

    def add(self, key: Any, seconds: float) -> None:
        """Record a rank, under any key, with the seconds of grace that it asks for."""
        with self._changed:
            self._seconds[key] = seconds

    def discard(self, key: Any) -> None:
        """Record that a rank has ended, or has no state left to save."""
        with self._changed:
            self._seconds.pop(key, None)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all ranks have ended or the longest grace period is over.

        The limit includes 10 s, the time that the notification of the ranks may take. Another
        interrupt ends the wait.
        """
        with self._changed:
            longest = max(self._seconds.values(), default=0.0)
            if not longest or self._changed.wait_for(lambda: not self._seconds, _SILENT_SECONDS):
                return
            deadline = time.monotonic() + longest + _UNTIL_ASKED_SECONDS
            logger.warning(
                "Waiting until the ranks have saved their state (at most %g s).", longest
            )
            if not self._changed.wait_for(lambda: not self._seconds, deadline - time.monotonic()):
                logger.warning("The ranks have not ended in time.")
