"""Large content as a file of this machine, which is gone when nobody holds it any more.

Who is killed deletes nothing. Folders therefore have names that tell whose they are, and the next
process of this user that makes one sweeps those of processes that are gone. A rank's are in the
folder of the rank, see `hvd_estimators.launch.rank.directory`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import IO

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, this_process

__all__ = ["LazyFile", "LocalFile", "folder_prefix", "sweep"]

_NAME = re.compile(r"hvd_estimators-of-([0-9a-f]{16})-(\d+)-(\d+)-\w+")


class LocalFile(os.PathLike[str]):
    """A temporary file that is deleted with the object. It does not cross between processes.

    Attributes
    ----------
    path : str
        The file, which is not there yet, in a folder of its own.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix=folder_prefix())
        self.path = os.path.join(directory, "content")
        self._delete = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def __fspath__(self) -> str:
        return self.path

    def close(self) -> None:
        """Delete the file."""
        self._delete()


class LazyFile(LocalFile):
    """A temporary file that is written when its path is first asked for.

    Parameters
    ----------
    write : callable
        Writes the content into an open file.
    """

    def __init__(self, write: Callable[[IO[bytes]], None]) -> None:
        super().__init__()
        self.write = write
        self._lock = threading.Lock()
        self._is_written = False

    def __fspath__(self) -> str:
        with self._lock:
            if not self._is_written:
                with open(self.path, "wb") as file:
                    self.write(file)
                self._is_written = True
        return self.path


def folder_prefix() -> str:
    """Return how the names of temporary folders of this process begin; sweeps those of others.

    For folders that nobody wants once the process is gone.
    """
    _sweep_once(tempfile.gettempdir())
    own = this_process()
    # Where it cannot be told whose a folder is, nobody sweeps it.
    is_known = own.machine and own.started.isdigit()
    if not is_known:
        return "hvd_estimators-"
    return f"hvd_estimators-of-{_digest(own.machine)}-{own.pid}-{own.started}-"


def sweep(parent: str) -> None:
    """Delete this user's temporary folders of processes that are surely gone."""
    machine = this_process().machine
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or not machine or named[1] != _digest(machine):
                continue
            with contextlib.suppress(OSError):
                if (
                    entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                    and is_dead(ProcessIdentity(machine, int(named[2]), named[3]))
                ):
                    shutil.rmtree(entry, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _sweep_once(parent: str) -> None:
    sweep(parent)


def _digest(machine: str) -> str:
    return hashlib.sha256(machine.encode()).hexdigest()[:16]
