"""Calls that Linux has and other systems may lack, each with its fallback.

No other module makes these calls, except for `hvd_estimators._util.process_identity`, which
describes processes, and `hvd_estimators.launch.warm`, which `has_warm_start_calls` switches off.
Imports little, because every rank and its guardian import it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
from typing import IO

PLATFORM = sys.platform
"""Name of the operating system, as in ``sys.platform``."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_file() -> IO[bytes]:
    """Open an in-memory file; an unnamed temporary file if the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("hvd-estimators"), "w+b")
    return tempfile.TemporaryFile()


def reading_end(descriptor: int) -> int | None:
    """Open the reading end of a pipe to which this process writes; None if the system cannot."""
    with contextlib.suppress(OSError):
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
    return None


def signal_of(status: int) -> str:
    """Return the name of the signal that ended a process; empty if it exited normally.

    A shell that ran the process reports 128 plus the number of the signal.
    """
    with contextlib.suppress(ValueError):
        if status < 0 or status > 128:
            return signal.Signals(-status if status < 0 else status - 128).name
    return ""


def forks_are_safe() -> bool:
    """Return whether a fork of a single-threaded process may use all libraries.

    On macOS, a fork that starts no new program cannot use Metal and some of Apple's frameworks.
    """
    return PLATFORM != "darwin"


def has_warm_start_calls() -> bool:
    """Return whether the system has the calls of `hvd_estimators.launch.warm`."""
    return (
        forks_are_safe()
        and hasattr(os, "memfd_create")
        and hasattr(os, "pidfd_open")
        and hasattr(socket, "SO_PEERCRED")
        and os.path.exists("/proc/self/fd")
    )


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents end. Linux only."""
    _control_process(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends. Linux only.

    Parameters
    ----------
    parent : int
        ID of the process that started this one. If it has already ended, so does this process.
    """
    _control_process(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _control_process(option: int, value: int) -> None:
    """Call Linux's ``prctl``, which Python does not wrap."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(int(value)), 0, 0, 0)
