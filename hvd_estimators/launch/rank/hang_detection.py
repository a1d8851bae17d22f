"""Detection of stopped, stalled and hanging ranks.

There are three cases, each with its own limit:

- A signal has stopped a process (SIGSTOP, Ctrl-Z in a terminal). The rank's task reads the state of
  the process from ``/proc``, and the rank counts as failed after 60 s. Slow or debugged processes,
  and processes of sleeping machines or paused containers, have other states.
- One rank holds up the others, for example by a deadlock. It cannot be distinguished from a rank
  whose first batch or validation takes long. Horovod warns after a minute. Horovod and torch end
  the ranks only if the user sets ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``. That value is then also
  the limit for stopped processes. A fit that relaunches lost ranks sets it, through
  `STALL_VARIABLE`. That limit is longer than any first batch, validation or checkpoint should
  take. Without it a hang would cost the whole run; with it a hang costs only that time.
- All ranks hang, each in the same call, and none holds up another, so Horovod notices nothing.
  Therefore trainers record progress with each batch, step and epoch, and the parent counts the
  seconds without any. It counts only during training, because it cannot judge other code. This
  indication is less certain: a callback may evaluate for hours on all ranks.
  A fit's default limit is therefore 8 times as long, and `HANG_VARIABLE` sets another one.

``HOROVOD_STALL_CHECK_DISABLE=1`` turns the second check off. Imports neither PySpark nor a
framework.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvd_estimators._util.process_identity import process_stat
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE

STALL_VARIABLE = "HVD_ESTIMATORS_STALL_SECONDS"
"""Environment variable of ranks: seconds a rank may hold up others if the user sets no limit."""

HANG_VARIABLE = "HVD_ESTIMATORS_HANG_SECONDS"
"""Environment variable of ranks: seconds a rank may train without progress; 0 means no limit."""

_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
# The same limit as for silent tasks.
_STOPPED_SECONDS = 60.0
# Multiple of the seconds that one rank may hold up others; four hours by default.
_ALL_RANKS = 8

_FILE = "progress"
_SECONDS_BETWEEN = 1.0


class _Progress:
    """State of this process's own signs of progress."""

    path: Path | None = None
    is_watched = False
    last = 0.0


@contextlib.contextmanager
def recording_progress() -> Iterator[None]:
    """Make this rank's parent watch for signs of progress in the block. Runs in the rank.

    If another launcher has started the process, no parent watches the signs.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    _Progress.path = None if directory is None else Path(directory, _FILE)
    _Progress.is_watched, _Progress.last = True, 0.0
    try:
        made_progress()
        yield
    finally:
        _Progress.is_watched = False
        if _Progress.path is not None:
            with contextlib.suppress(OSError):
                _Progress.path.unlink()


def made_progress() -> None:
    """Record progress, at most once a second, so every step and reading thread may call it."""
    now = time.monotonic()
    if not _Progress.is_watched or now - _Progress.last < _SECONDS_BETWEEN:
        return
    _Progress.last = now
    if _Progress.path is not None:
        # The directory may already have been deleted.
        with contextlib.suppress(OSError):
            _Progress.path.write_text(repr(now))


def seconds_without_progress() -> float:
    """Return the seconds since this process's last progress; 0 outside of training."""
    return time.monotonic() - _Progress.last if _Progress.is_watched else 0.0


def read_progress(directory: str) -> str | None:
    """Return the mark of a rank's last progress, given its directory; None outside of training."""
    try:
        return Path(directory, _FILE).read_text()
    except OSError:
        return None


def hang_limit(env: Mapping[str, str]) -> float:
    """Return the maximum seconds that a rank with the given environment may make no progress."""
    if HANG_VARIABLE in env:
        return float(_whole(env[HANG_VARIABLE])) or math.inf
    return float(_ALL_RANKS * _whole(env.get(STALL_VARIABLE))) or math.inf


def stall_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes Horovod apply a fit's limit, unless the user has set it."""
    if _SHUTDOWN not in env and _whole(env.get(STALL_VARIABLE)):
        return {_SHUTDOWN: env[STALL_VARIABLE]}
    return {}


def hold_up_limit(env: Mapping[str, str]) -> float:
    """Return the seconds that ranks wait for an absent one before they fail.

    Horovod reads the same variables. Used by ranks with ``collectives="torch"``.
    """
    is_off = _whole(env.get(_DISABLE)) > 0
    return math.inf if is_off else float(_whole(env.get(_SHUTDOWN))) or math.inf


def _whole(text: str | None) -> int:
    """Parse a number as Horovod does; return 0 if the text is not a number."""
    number = re.match(r"\s*\+?(\d+)", text or "")
    return int(number[1]) if number else 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False if the state is unknown."""
    try:
        # A lower-case t means that a debugger holds the process.
        return process_stat(pid).state == "T"
    except OSError:
        return False


class StallWatch:
    """Watch of a rank's process that may be stopped, or make no progress.

    Parameters
    ----------
    env : mapping
        The rank's environment, with the limits.
    most : float
        Maximum seconds to count between two looks. A longer interval means that this process was
        paused.
    """

    def __init__(self, env: Mapping[str, str], most: float) -> None:
        # A fit's own limit does not apply to a stopped process.
        self._stop_limit = float(_whole(env.get(_SHUTDOWN))) or _STOPPED_SECONDS
        self._hang_limit = hang_limit(env)
        self._stopped = self._silent = 0.0
        self._most = most
        self._mark: str | None = None
        self._last: float | None = None

    def update(self, is_stopped: bool, mark: str | None, now: float) -> str | None:
        """Record a rank's state, and return an error message if the rank has stalled.

        Parameters
        ----------
        is_stopped : bool
            Whether the rank's process is stopped.
        mark : str or None
            From `read_progress`; None outside of training.
        now : float
            Seconds of any monotonic clock.
        """
        passed = 0.0 if self._last is None else min(now - self._last, self._most)
        is_silent = mark is not None and mark == self._mark
        self._mark, self._last = mark, now
        self._stopped = self._stopped + passed if is_stopped else 0.0
        self._silent = self._silent + passed if is_silent else 0.0
        if self._stopped >= self._stop_limit:
            return (
                f"The process has been stopped for {self._stop_limit:g} s, as by SIGSTOP, and was "
                f"not continued. ({_SHUTDOWN} sets another limit.)"
            )
        if self._silent >= self._hang_limit:
            return (
                f"The rank has made no progress for {self._hang_limit:g} s: there was no batch and "
                f"no end of an epoch. ({HANG_VARIABLE} in the ranks' environment sets another "
                "limit, 0 none.)"
            )
        return None
