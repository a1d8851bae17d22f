"""Identify processes, such as owners of leases and temporary folders, and check if they are alive.

The operating system reports on processes of this machine only. Processes on other machines write
heartbeats, see `hvd_estimators.store.leases`. Linux reports in ``/proc``. On other systems psutil
asks the system.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProcessStat:
    """Status of a process, as in ``/proc/PID/stat``; see proc(5).

    Attributes
    ----------
    name : str
        Name of the program, at most 15 characters.
    state : str
        State as one letter; ``Z`` is a zombie, ``T`` a process that a signal has stopped.
    parent : int
        Process ID of the parent.
    started : str
        Start time as a whole number, in ticks of the machine's clock.
    """

    name: str
    state: str
    parent: int
    started: str


def process_stat(pid: int) -> ProcessStat:
    """Return the status of a process of this machine.

    Raises
    ------
    OSError
        If there is no such process, or this process may not see it.
    """
    if not _has_proc():
        return _stat_of_psutil(pid)
    # PID (name) state parent ...; the name may contain any character.
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    fields = after.split()
    return ProcessStat(before.partition("(")[2], fields[0], int(fields[1]), fields[19])


def _stat_of_psutil(pid: int) -> ProcessStat:
    import psutil

    started = ""
    states = {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_DEAD: "X", psutil.STATUS_STOPPED: "T"}
    try:
        process = psutil.Process(pid)
        # In microseconds, as a whole number.
        started = str(round(process.create_time() * 1e6))
        state = states.get(process.status(), "S")
        return ProcessStat(process.name(), state, process.ppid(), started)
    except psutil.ZombieProcess:
        return ProcessStat("", "Z", 0, started)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error
    except psutil.AccessDenied as error:
        raise PermissionError(f"no access to process {pid}") from error


@functools.cache
def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")


def pid_exists(pid: int) -> bool:
    """Return whether a process of this machine has a process ID, even another user's process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # a damaged file may hold any number
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
        Boot ID of the machine and namespace of its PIDs, if any; empty if unknown. Host names can
        be shared, and so can the machine IDs in images.
    pid : int
        Its PID.
    started : str
        Start time as a whole number, since PIDs are reused.
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


def boot_id() -> str:
    """Return an ID of this boot of the machine; empty if the system has none."""
    if not _has_proc():
        return _macos_boot_id()
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def namespace_id(kind: str) -> str:
    """Return an ID of a namespace of this process; empty on systems without namespaces.

    Parameters
    ----------
    kind : {'mnt', 'net', 'pid'}
        The kind of the namespace; see namespaces(7).
    """
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@functools.lru_cache(maxsize=1)
def _machine() -> str:
    boot, namespace = boot_id(), namespace_id("pid")
    if _has_proc() and not namespace:
        return ""
    return f"{boot} {namespace}".strip() if boot else ""


def _macos_boot_id() -> str:
    command = ["sysctl", "-n", "kern.bootsessionuuid"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
