"""Identify processes, such as owners of leases and temporary folders, and check if they are alive.

The operating system reports on processes of this machine only. Processes on other machines write
heartbeats, see `hvd_estimators.store.leases`.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "ProcessIdentity",
    "ProcessStat",
    "is_dead",
    "is_here",
    "pid_exists",
    "process_stat",
    "this_process",
]


@dataclass(frozen=True)
class ProcessStat:
    """Status of a process from ``/proc/PID/stat``; see proc(5).

    Attributes
    ----------
    name : str
        Name of the program, at most 15 characters.
    state : str
        State as one letter; ``Z`` is a zombie, ``T`` a process that a signal has stopped.
    parent : int
        Process ID of the parent.
    started : str
        Start time in ticks of the machine's clock.
    """

    name: str
    state: str
    parent: int
    started: str


def process_stat(pid: int) -> ProcessStat:
    """Read the status of a process of this machine. Linux only.

    Raises
    ------
    OSError
        If there is no such process, or no ``/proc``.
    """
    # PID (name) state parent ...; the name may contain any character.
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    fields = after.split()
    return ProcessStat(before.partition("(")[2], fields[0], int(fields[1]), fields[19])


def pid_exists(pid: int) -> bool:
    """Return whether a process of this machine has a process ID, even another user's process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, on any machine.

    Attributes
    ----------
    machine : str
        Boot ID of the machine and namespace of its PIDs; empty if unknown. Host names can be
        shared, and so can the machine IDs in images.
    pid : int
        Its PID.
    started : str
        Start time in ticks of the machine's clock, since PIDs are reused.
    host : str
        Host name, for messages.
    """

    machine: str
    pid: int
    started: str
    host: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    machine, pid = _machine(), os.getpid()
    started = process_stat(pid).started if machine else ""
    return ProcessIdentity(machine, pid, started, socket.gethostname())


def is_dead(owner: ProcessIdentity | None) -> bool:
    """Return whether a process of this machine has certainly ended; False for other machines."""
    if owner is None or not is_here(owner):
        return False
    try:
        stat = process_stat(owner.pid)
    except OSError:
        # /proc may hide other users' processes.
        return not pid_exists(owner.pid)
    return stat.state in "ZX" or stat.started != owner.started


def is_here(owner: ProcessIdentity) -> bool:
    """Return whether a process shares this process's machine and PID namespace."""
    return bool(owner.machine) and owner.machine == _machine()


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
