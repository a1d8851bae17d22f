"""Ranks that make no progress: whose process is stopped, or that hold up the others.

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

Where all ranks hang, none holds up another. Of a fit, `hvd_estimators.launch.rank.liveness` sees
that none takes a batch. That is less sure a sign, as of a callback that evaluates for hours on all
ranks. So the fit's own limit for it is some times as long, and `HANG_VARIABLE` sets another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "HANG_VARIABLE",
    "PATIENCE_VARIABLE",
    "StallWatch",
    "hang_limit",
    "is_stopped",
    "stall_environment",
    "stall_limit",
    "stalled_ranks",
]

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
