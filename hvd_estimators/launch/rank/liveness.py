"""Signs of progress, which a rank that trains leaves for its parent, in a file of its directory.

Horovod looks for ranks that hold up others. Where all of them hang, each in the same call that does
not return, nobody holds up anybody. Therefore trainers leave a sign with each batch, step and
epoch, and the parent counts the seconds in which there is none. Only while they train: what else a
call does on ranks is nobody's to judge. Imports neither PySpark nor a framework.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hvd_estimators.launch.rank.grace import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.stalls import HANG_VARIABLE

__all__ = [
    "HangWatch",
    "leave_stack",
    "leaving_signs",
    "made_progress",
    "seconds_without_progress",
    "sign_left",
    "stack_left",
]

_FILE = "progress"
_STACK_FILE = "stack"
_SECONDS_BETWEEN = 1.0


class _Signs:
    """What this process knows of its own signs."""

    path: Path | None = None
    wanted = False
    last = 0.0


@contextlib.contextmanager
def leaving_signs() -> Iterator[None]:
    """Have this rank's parent watch for signs of progress in the block. Runs in the rank.

    In a process that another launcher has started there is nobody to see them.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    _Signs.path = None if directory is None else Path(directory, _FILE)
    _Signs.wanted, _Signs.last = True, 0.0
    try:
        made_progress()
        yield
    finally:
        _Signs.wanted = False
        if _Signs.path is not None:
            with contextlib.suppress(OSError):
                _Signs.path.unlink()


def made_progress() -> None:
    """Leave a sign; cheap enough for every step, and for the threads that read ahead."""
    now = time.monotonic()
    if not _Signs.wanted or now - _Signs.last < _SECONDS_BETWEEN:
        return
    _Signs.last = now
    if _Signs.path is not None:
        # The directory goes when nobody waits any more.
        with contextlib.suppress(OSError):
            _Signs.path.write_text(repr(now))


def seconds_without_progress() -> float:
    """Return for how long this process has left no sign; 0 where it is to leave none."""
    return time.monotonic() - _Signs.last if _Signs.wanted else 0.0


def leave_stack(stack: str) -> None:
    """Leave the calls that this rank waits in for its parent."""
    if _Signs.path is not None:
        with contextlib.suppress(OSError):
            _Signs.path.with_name(_STACK_FILE).write_text(stack)


def stack_left(directory: str) -> str:
    """Return the calls that a rank waits in, given its directory; empty if it has left none."""
    try:
        return Path(directory, _STACK_FILE).read_text()
    except OSError:
        return ""


def sign_left(directory: str) -> str | None:
    """Return the last sign of a rank, given its directory; None while it is to leave none."""
    try:
        return Path(directory, _FILE).read_text()
    except OSError:
        return None


class HangWatch:
    """Adds up for how long a rank has left no new sign.

    Parameters
    ----------
    limit : float
        Seconds after which it counts as stalled.
    most : float
        Seconds that count at most between two looks: what is longer was a pause of this process.
    """

    def __init__(self, limit: float, most: float) -> None:
        self._limit, self._most = limit, most
        self._sign: str | None = None
        self._silent = 0.0
        self._last = 0.0

    def look(self, sign: str | None, now: float) -> str | None:
        """Take note of a rank's last sign, and return what is wrong with it if it hangs.

        Parameters
        ----------
        sign : str or None
            The sign; None while the rank is to leave none.
        now : float
            Seconds by any clock that does not go back.
        """
        passed, self._last = now - self._last, now
        if sign is None or sign != self._sign:
            self._sign, self._silent = sign, 0.0
            return None
        self._silent += min(passed, self._most)
        if self._silent < self._limit:
            return None
        return (
            f"The rank has made no progress for {self._limit:g} s: there was no batch and no end "
            f"of an epoch. ({HANG_VARIABLE} in the ranks' environment sets another limit, 0 none.)"
        )
