"""The process that owns a prepared dataset, so that others can see whether it has ended.

Runs on the driver. A file beside each dataset names the process that wrote it. Any process on the
same machine that finds this process dead may delete the dataset. Nothing is known about processes
on other machines: clocks and heartbeats only make it likely that they are dead.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import Store

__all__ = ["SUFFIX", "Owner", "is_dead", "mark", "owner_of", "owner_path", "this_process"]

SUFFIX = ".owner"
"""Follows the path of the training part."""


@dataclass(frozen=True)
class Owner:
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
    """

    machine: str
    pid: int
    started: str


def owner_path(store: Store, index: str) -> str:
    """Return the path of the file that names a dataset's owner."""
    return store.get_train_data_path(index) + SUFFIX


def this_process() -> Owner:
    """Return this process as an owner."""
    return Owner(_machine(), os.getpid(), _started(os.getpid()))


def mark(store: Store, index: str) -> None:
    """Name this process as a dataset's owner."""
    store.write_text(owner_path(store, index), json.dumps(asdict(this_process())))


def owner_of(store: Store, index: str) -> Owner | None:
    """Return who wrote a dataset; None if the owner's file is missing or damaged."""
    try:
        document = json.loads(store.read(owner_path(store, index)))
        return Owner(str(document["machine"]), int(document["pid"]), str(document["started"]))
    except (StoreError, ValueError, KeyError, TypeError):
        return None


def is_dead(owner: Owner | None) -> bool:
    """Return whether a process is certainly gone."""
    if owner is None or not owner.machine or owner.machine != _machine():
        return False
    try:
        return not psutil.pid_exists(owner.pid) or _started(owner.pid) not in ("", owner.started)
    except psutil.NoSuchProcess:
        return True


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
