"""Detection of ranks that hang: signs of progress, and watches over them.

Horovod looks for ranks that hold up others. Where all of them hang, each in the same call that does
not return, nobody holds up anybody. Therefore trainers leave a sign with each batch, step and
epoch, and the parent counts the seconds in which there is none. Only while they train: what else a
call does on ranks is nobody's to judge. Imports neither PySpark nor a framework.

A process that a signal has stopped (SIGSTOP, a terminal's Ctrl-Z) is told by its state, which its
task reads from ``/proc``: after 60 s the rank counts as failed. It cannot be mistaken for one that
is slow, and a machine that sleeps, a container that is paused and a debugger that holds a process
leave other states.

A rank that hangs, by a deadlock say, cannot be told from one that takes long over its first batch
or its validation. Horovod warns of it after a minute, and ends the ranks only where the user has
said for how long a rank may hold up the others: ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``. That is
then the limit for processes that are stopped as well. ``HOROVOD_STALL_CHECK_DISABLE=1`` turns both
off.

A fit that launches its ranks again where one is lost has such a limit without the user, in
`PATIENCE_VARIABLE`: as long as no first batch, validation or checkpoint takes, since a hang that is
never noticed would cost the whole run, and one that is noticed late costs that time.

Where all ranks hang, none holds up another. Of a fit, signs of progress show that none takes a
batch. That is less sure a sign, as of a callback that evaluates for hours on all
ranks. So the fit's own limit for it is some times as long, and `HANG_VARIABLE` sets another.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE

__all__ = [
    "HANG_VARIABLE",
    "PATIENCE_VARIABLE",
    "HangWatch",
    "StallWatch",
    "hang_limit",
    "is_stopped",
    "leave_stack",
    "leaving_signs",
    "made_progress",
    "seconds_without_progress",
    "sign_left",
    "stack_left",
    "stall_environment",
    "stall_limit",
    "stalled_ranks",
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


PATIENCE_VARIABLE = "HVD_ESTIMATORS_STALL_SECONDS"


"""Environment variable of ranks: how long one may hold up others where the user sets no limit."""


HANG_VARIABLE = "HVD_ESTIMATORS_HANG_SECONDS"


"""Environment variable of ranks: how long one may train without any progress; 0 for ever."""


_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"


_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"


# As long as a task may be silent.
_STOPPED_SECONDS = 60.0


_HOROVODS_CHECK_SECONDS = 60


# Times as long as one rank may hold up others: four hours.
_ALL_RANKS = 8


# What Horovod's coordinator prints when it ends the job: "1!: [tensor, tensor ...]".
_SHUTDOWN_LINE = re.compile(r"is stalled for longer than (\d+) seconds\. Will shutdown")


_STALLED_LINE = re.compile(r"^(\d+)!: \[(.*)\]$", re.MULTILINE)


def stall_limit(env: Mapping[str, str]) -> float:
    """Return for how many seconds the process of a rank with some environment may be stopped."""
    if _whole(env.get(_DISABLE)) > 0:
        return math.inf
    return float(_whole(env.get(_SHUTDOWN))) or _STOPPED_SECONDS


def hang_limit(env: Mapping[str, str]) -> float:
    """Return for how many seconds a rank with some environment may train without any progress."""
    if _whole(env.get(_DISABLE)) > 0:
        return math.inf
    if HANG_VARIABLE in env:
        return float(_whole(env[HANG_VARIABLE])) or math.inf
    if _SHUTDOWN in env and not _whole(env[_SHUTDOWN]):
        return math.inf
    return float(_ALL_RANKS * _whole(env.get(PATIENCE_VARIABLE))) or math.inf


def stall_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make Horovod keep to the limit that a rank's environment has.

    Horovod looks for stalled ranks once a minute, and shuts down only after as long at least.
    """
    if _SHUTDOWN not in env and _whole(env.get(PATIENCE_VARIABLE)):
        env = {**env, _SHUTDOWN: env[PATIENCE_VARIABLE]}
        return {_SHUTDOWN: env[_SHUTDOWN], **stall_environment(env)}
    limit = _whole(env.get(_SHUTDOWN))
    if 0 < limit < 2 * _HOROVODS_CHECK_SECONDS and _CHECK not in env:
        return {_CHECK: str(max(limit // 2, 1))}
    return {}


def _whole(text: str | None) -> int:
    """Read a number as Horovod does; 0 where it is none."""
    found = re.match(r"\s*\+?(\d+)", text or "")
    return int(found[1]) if found else 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False where nobody can tell."""
    try:
        # PID (name) state ...; a name can hold anything.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    # In lower case a debugger holds it.
    return state == b"T"


class StallWatch:
    """Adds up for how long ranks have been stopped.

    Parameters
    ----------
    limit : float
        Seconds after which one counts as stalled.
    most : float
        Seconds that count at most between two looks: what is longer was a pause of this process.
    """

    def __init__(self, limit: float, most: float) -> None:
        self._limit, self._most = limit, most
        self._stopped: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def look(self, rank: int, stopped: bool, now: float) -> str | None:
        """Take note of a rank, and return what is wrong with it if it has stalled.

        Parameters
        ----------
        rank : int
            The rank.
        stopped : bool
            Whether its process is stopped.
        now : float
            Seconds by any clock that does not go back.
        """
        passed = now - self._last.get(rank, now)
        self._last[rank] = now
        if not stopped:
            self._stopped.pop(rank, None)
            return None
        self._stopped[rank] = self._stopped.get(rank, 0.0) + min(passed, self._most)
        if self._stopped[rank] < self._limit:
            return None
        return (
            f"The process has been stopped for {self._limit:g} s, as by SIGSTOP, and nobody has "
            f"continued it. ({_SHUTDOWN} sets another limit, {_DISABLE}=1 none.)"
        )


def stalled_ranks(output: str) -> tuple[float, dict[int, str]] | None:
    """Return the limit and the ranks that Horovod has shut down for, going by a rank's output.

    Parameters
    ----------
    output : str
        The end of what rank 0 printed.

    Returns
    -------
    (float, dict) or None
        Seconds, and for each rank the names of the tensors that others waited for; None if Horovod
        has not shut down for such a reason.
    """
    ended = list(_SHUTDOWN_LINE.finditer(output))
    ranks = {int(rank): tensors for rank, tensors in _STALLED_LINE.findall(output)}
    return (float(ended[-1][1]), ranks) if ended and ranks else None
