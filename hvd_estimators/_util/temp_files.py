"""Temporary files for large content, deleted with the objects that own them.

A killed process deletes nothing. The names of temporary folders therefore identify their process.
The next process of the same user that creates a temporary folder deletes the folders of ended
processes. A rank's temporary folders are inside the rank's own folder, see
`hvd_estimators.launch.rank.process`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, this_process

_NAME = re.compile(r"hvd_estimators-of-([0-9a-f]{16})-(\d+)-(\d+)-\w+")


class LocalFile(os.PathLike[str]):
    """A temporary file that is deleted with the object. The object must stay in its process.

    Attributes
    ----------
    path : str
        Path of the file, which is not created yet, in a separate folder.
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


def folder_prefix() -> str:
    """Return the name prefix for this process's temporary folders, and sweep stale folders.

    Use the prefix for folders that must not outlive the process.
    """
    _sweep_once(tempfile.gettempdir())
    own = this_process()
    # A folder without a known owner is never swept.
    is_known = own.machine and own.started.isdigit()
    if not is_known:
        return "hvd_estimators-"
    return f"hvd_estimators-of-{_digest(own.machine)}-{own.pid}-{own.started}-"


def sweep(parent: str) -> None:
    """Delete this user's temporary folders whose processes have certainly ended."""
    machine = this_process().machine

    def is_abandoned(folder: Path) -> bool:
        name = _NAME.fullmatch(folder.name)
        if name is None or not machine or name[1] != _digest(machine):
            return False
        return is_dead(ProcessIdentity(machine, int(name[2]), name[3]))

    delete_folders(parent, is_abandoned)


def delete_folders(parent: str, is_abandoned: Callable[[Path], bool]) -> None:
    """Delete the folders of this user for which a function returns True; errors are ignored."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            # A damaged file of a folder's owner may hold anything.
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                if (
                    entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                    and is_abandoned(Path(entry))
                ):
                    shutil.rmtree(entry, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _sweep_once(parent: str) -> None:
    sweep(parent)


def _digest(machine: str) -> str:
    return hashlib.sha256(machine.encode()).hexdigest()[:16]
