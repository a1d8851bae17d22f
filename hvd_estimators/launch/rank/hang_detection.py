"""Detection of stopped, stalled and hanging ranks.

There are three cases, each with its own limit:

- A signal has stopped a process (SIGSTOP, Ctrl-Z in a terminal). The rank's task reads the state of
  the process from ``/proc``, and the rank counts as failed after 60 s. Slow or debugged processes,
  and processes of sleeping machines or paused containers, have other states.
- One rank holds up the others, for example by a deadlock. It cannot be distinguished from a rank
  whose first batch or validation takes long. Horovod warns after a minute, and ends the ranks only
  if the user sets ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``. That value is then also the limit for
  stopped processes. A fit that relaunches lost ranks sets only Horovod's limit, through
  `STALL_VARIABLE`. That limit is longer than any first batch, validation or checkpoint should
  take. Without the limit a hang would cost the whole run; with it a hang costs only that time.
- All ranks hang, each in the same call, and none holds up another, so Horovod notices nothing.
  Therefore trainers record progress with each batch, step and epoch, and the parent counts the
  seconds without any. It counts only during training, because it cannot judge other code. This
  indication is less certain: a callback may evaluate for hours on all ranks.
  A fit's default limit is therefore 8 times as long, and `HANG_VARIABLE` sets another one.

``HOROVOD_STALL_CHECK_DISABLE=1`` turns all of these checks off. Imports neither PySpark nor a
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
_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
_HOROVODS_CHECK_SECONDS = 60
# The same limit as for silent tasks.
_STOPPED_SECONDS = 60.0
# Multiple of the seconds that one rank may hold up others; four hours by default.
_ALL_RANKS = 8

# Horovod's coordinator prints these lines when it ends the job; "1!: [tensor, tensor ...]" names
# a rank and the tensors that others wait for.
_SHUTDOWN_LINE = re.compile(r"is stalled for longer than (\d+) seconds\. Will shutdown")
_STALLED_LINE = re.compile(r"^(\d+)!: \[(.*)\]$", re.MULTILINE)

# `not_taking_part` in the error of a rank.
_ABSENT_LINE = re.compile(r"Rank (\d+) has not taken part in '(.*)' for (\d+) s\.$", re.MULTILINE)

_FILE = "progress"
_STACK_FILE = "stack"
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


def write_stack(stack: str) -> None:
    """Write the call stack in which this rank waits to a file that its parent reads."""
    if _Progress.path is not None:
        with contextlib.suppress(OSError):
            _Progress.path.with_name(_STACK_FILE).write_text(stack)


def read_stack(directory: str) -> str:
    """Return the call stack that a rank has written to its directory; empty if there is none."""
    try:
        return Path(directory, _STACK_FILE).read_text()
    except OSError:
        return ""


def read_progress(directory: str) -> str | None:
    """Return the mark of a rank's last progress, given its directory; None outside of training."""
    try:
        return Path(directory, _FILE).read_text()
    except OSError:
        return None


def stall_limit(env: Mapping[str, str]) -> float:
    """Return the maximum seconds that a rank with the given environment may be stopped."""
    if _whole(env.get(_DISABLE)) > 0:
        return math.inf
    return float(_whole(env.get(_SHUTDOWN))) or _STOPPED_SECONDS


def hang_limit(env: Mapping[str, str]) -> float:
    """Return the maximum seconds that a rank with the given environment may make no progress."""
    if _whole(env.get(_DISABLE)) > 0:
        return math.inf
    if HANG_VARIABLE in env:
        return float(_whole(env[HANG_VARIABLE])) or math.inf
    if _SHUTDOWN in env and not _whole(env[_SHUTDOWN]):
        return math.inf
    return float(_ALL_RANKS * _whole(env.get(STALL_VARIABLE))) or math.inf


def stall_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Horovod apply the stall limit of a rank's environment.

    By default Horovod checks for stalled ranks once a minute, and cannot shut down any sooner. A
    limit below two minutes therefore needs more frequent checks.
    """
    if _SHUTDOWN not in env and _whole(env.get(STALL_VARIABLE)):
        env = {**env, _SHUTDOWN: env[STALL_VARIABLE]}
        return {_SHUTDOWN: env[_SHUTDOWN], **stall_environment(env)}
    limit = _whole(env.get(_SHUTDOWN))
    if 0 < limit < 2 * _HOROVODS_CHECK_SECONDS and _CHECK not in env:
        return {_CHECK: str(max(limit // 2, 1))}
    return {}


def hold_up_limits(env: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds that ranks wait for an absent one before they warn, and before they fail.

    Horovod reads the same variables. Used by ranks with ``collectives="torch"``.
    """
    if _whole(env.get(_DISABLE)) > 0:
        return math.inf, math.inf
    return (
        float(_whole(env.get(_CHECK)) or _HOROVODS_CHECK_SECONDS),
        float(_whole(env.get(_SHUTDOWN))) or math.inf,
    )


def not_taking_part(rank: int, name: str, seconds: float) -> str:
    """Return a line about a rank that holds up others, which `stalled_ranks` parses."""
    return f"Rank {rank} has not taken part in {name!r} for {seconds:.0f} s."


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
        self._stall_limit, self._hang_limit = stall_limit(env), hang_limit(env)
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
        if self._stopped >= self._stall_limit:
            return (
                f"The process has been stopped for {self._stall_limit:g} s, as by SIGSTOP, and was "
                f"not continued. ({_SHUTDOWN} sets another limit, {_DISABLE}=1 none.)"
            )
        if self._silent >= self._hang_limit:
            return (
                f"The rank has made no progress for {self._hang_limit:g} s: there was no batch and "
                f"no end of an epoch. ({HANG_VARIABLE} in the ranks' environment sets another "
                "limit, 0 none.)"
            )
        return None


def stalled_ranks(output: str) -> tuple[float, dict[int, str]] | None:
    """Parse the stall limit and the stalled ranks from a rank's output and error.

    Horovod prints them on rank 0 when it shuts down. With ``collectives="torch"`` they are in the
    error of each rank that has waited.

    Parameters
    ----------
    output : str
        The end of a rank's output, and its error.

    Returns
    -------
    (float, dict) or None
        The limit in seconds, and for each stalled rank the names of the tensors that other ranks
        waited for. None if the rank has not ended because of stalled ranks.
    """
    absent = _ABSENT_LINE.findall(output)
    if absent and "CollectiveError" in output:
        return float(absent[0][2]), {int(rank): name for rank, name, _ in absent}
    ended = list(_SHUTDOWN_LINE.finditer(output))
    ranks = {int(rank): tensors for rank, tensors in _STALLED_LINE.findall(output)}
    return (float(ended[-1][1]), ranks) if ended and ranks else None
