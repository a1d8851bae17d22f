"""The sockets of warm processes, in a folder that only this user can enter, and whose they are."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hvd_estimators.launch.rank.forked import ANSWER_SECONDS

__all__ = ["address_of", "connected", "is_alive", "process_facts", "sockets_folder"]


@contextlib.contextmanager
def sockets_folder() -> Iterator[int]:
    """Open the folder of sockets, which is this user's alone."""
    path = Path(tempfile.gettempdir(), f"hvd-estimators-warm-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not this user's alone")
        yield folder
    finally:
        os.close(folder)


def connected(folder: int, name: str) -> socket.socket:
    """Connect to the warm process of a name, which counts as used then."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(address_of(folder, name))
        with contextlib.suppress(OSError):
            os.utime(name, dir_fd=folder)
        return connection
    except BaseException:
        connection.close()
        raise


def address_of(folder: int, name: str) -> str:
    """Return a path of a socket; the folder's own may be longer than a socket's may be."""
    return f"/proc/self/fd/{folder}/{name}"


def process_facts(pid: int) -> tuple[str, int, int]:
    """Return the name, the parent and the time of start of a process."""
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    before, _, after = text.rpartition(")")
    fields = after.split()
    return before.partition("(")[2], int(fields[1]), int(fields[19])


def is_alive(owner: str) -> bool:
    """Return whether the process lives that a socket's name says it belongs to."""
    pid, _, started = owner.partition(".")
    try:
        return process_facts(int(pid))[2] == int(started)
    except (OSError, ValueError):
        return False
