"""The process that something stored, or a temporary folder, belongs to: whether it still lives.

The operating system tells, of processes of this machine alone. Those of others have to tell
themselves, see `hvd_estimators.store.leases`.
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
    """A process.

    Attributes
    ----------
    machine : str
        The boot of the machine and the namespace of its PIDs; empty where they are unknown. Host
        names can be shared, and so can the IDs in images of machines.
    pid : int
        Its PID.
    started : str
        When it started, in ticks of the machine's clock, since PIDs are used again.
    host : str
        The machine's name, for messages.
    """

    machine: str
    pid: int
    started: str
    host: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"


def this_process() -> ProcessIdentity:
    """Return this process as an owner."""
    return ProcessIdentity(_machine(), os.getpid(), _started(os.getpid()), socket.gethostname())


def is_dead(owner: ProcessIdentity | None) -> bool:
    """Return whether a process is certainly gone: it was one of this machine, and is no more."""
    if owner is None or not is_here(owner):
        return False
    try:
        return not psutil.pid_exists(owner.pid) or _started(owner.pid) not in ("", owner.started)
    except psutil.NoSuchProcess:
        return True


def is_here(owner: ProcessIdentity) -> bool:
    """Return whether an owner runs, or ran, where its PID means the same as here."""
    return bool(owner.machine) and owner.machine == _machine()


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process started; empty if that cannot be read, "ended" for a zombie."""
    try:
        # The name can hold anything. After it, the state comes first and the start is 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError as error:
        if Path("/proc/self/stat").exists() and not psutil.pid_exists(pid):
            raise psutil.NoSuchProcess(pid) from error
        return ""
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
