"""A rank's directory on its machine, which exists only as long as the rank.

The rank's parent creates and deletes the directory. If the parent was killed, the rank's guardian
deletes it. If parent, guardian and rank were all killed at once, the directory remains. The next
process of the same user on this machine that starts a rank then deletes it.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, pid_exists, this_process
from hvd_estimators._util.temp_files import delete_folders
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.guardian import PID_FILE

_PREFIX = "hvd-estimators-rank-"
_OWNER_FILE = "owner.json"
# A socket path has at most 107 characters; the names that Python and torch append take up to 36.
_MOST_CHARACTERS = 70
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def make_rank_folder() -> str:
    """Create a directory for a rank, and delete abandoned directories of earlier ranks.

    Raises
    ------
    StoreError
        If the disk is full.
    """
    parent = tempfile.gettempdir()
    _sweep_once(parent)
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        Path(folder, _OWNER_FILE).write_text(json.dumps(asdict(this_process())))
    except OSError:
        # Processes that start ranks otherwise do not need the store's modules.
        from hvd_estimators.store.storage_errors import naming_full_disk

        with naming_full_disk():
            raise
    return folder


def use_own_temporary_folder() -> None:
    """Make this rank create its temporary files in its own directory.

    The temporary files are deleted with that directory. A killed rank cannot delete them itself;
    TensorFlow, for example, leaves its generated code behind.

    Does nothing if another launcher started the rank, or if the rank's temporary directory differs
    from its parent's. Does nothing if the new path would be too long for sockets.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    before = tempfile.gettempdir()
    folder = os.path.join(directory, "tmp")
    if os.path.dirname(directory) != before or len(folder) > _MOST_CHARACTERS:
        return
    os.makedirs(folder, exist_ok=True)
    # The next fit can reuse the code that torch has compiled, so the cache stays outside.
    with contextlib.suppress(KeyError, OSError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault(_INDUCTOR_VARIABLE, os.path.join(before, f"torchinductor_{user}"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def sweep(parent: str) -> None:
    """Delete this user's rank directories whose rank and parent have certainly both ended."""

    def is_abandoned(folder: Path) -> bool:
        if not folder.name.startswith(_PREFIX):
            return False
        starter = ProcessIdentity(**json.loads((folder / _OWNER_FILE).read_text()))
        return is_dead(starter) and not _is_running(folder / PID_FILE)

    delete_folders(parent, is_abandoned)


@functools.lru_cache(maxsize=1)
def _sweep_once(parent: str) -> None:
    sweep(parent)


def _is_running(pid_file: Path) -> bool:
    """Return whether a process with the rank's process ID exists."""
    try:
        return pid_exists(int(pid_file.read_text()))
    except FileNotFoundError:
        return False  # the rank had not started, and cannot start without its parent
