"""Identify the owner of a lease or a temporary folder, and check if the owner is alive.

The operating system reports on processes of this machine only. Processes on other machines write
heartbeats, see `hvd_estimators.store.leases`.
"""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

__all__ = ["ProcessIdentity", "is_dead", "is_here", "this_process"]


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
    return ProcessIdentity(_machine(), os.getpid(), _started(os.getpid()), socket.gethostname())


def is_dead(owner: ProcessIdentity | None) -> bool:
    """Return whether a process of this machine has certainly ended; False for other machines."""
    if owner is None or not is_here(owner):
        return False
    try:
        return not psutil.pid_exists(owner.pid) or _started(owner.pid) not in ("", owner.started)
    except psutil.NoSuchProcess:
        return True


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


def _started(pid: int) -> str:
    """Return a process's start time; empty if it cannot be read, "ended" for a zombie."""
    try:
        # The name can contain any characters. After the name, the state is first and the start time
        # 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError as error:
        if Path("/proc/self/stat").exists() and not psutil.pid_exists(pid):
            raise psutil.NoSuchProcess(pid) from error
        return ""
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
