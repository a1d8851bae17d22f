"""The folder of a rank on its machine: made by its parent, and gone with the rank.

It is deleted by the rank's parent or, where that has been killed, by the rank's guardian. What is
left where all three were killed at once is swept by the next process of this machine and user that
starts a rank.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import psutil

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, this_process
from hvd_estimators.launch.rank.graceful_stop import DIRECTORY_VARIABLE
from hvd_estimators.launch.rank.guardian import PID_FILE

__all__ = ["make_rank_folder", "sweep", "use_own_temporary_folder"]

_PREFIX = "hvd-estimators-rank-"
_OWNER_FILE = "owner.json"
# A socket's path has at most 107 characters, of which Python's and torch's take up to 36.
_MOST_CHARACTERS = 70
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def make_rank_folder() -> str:
    """Make a folder for a rank, and sweep those that nobody is left to delete."""
    parent = tempfile.gettempdir()
    _sweep_once(parent)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    Path(folder, _OWNER_FILE).write_text(json.dumps(asdict(this_process())))
    return folder


def use_own_temporary_folder() -> None:
    """Let this process, a rank, put temporary files into its folder, with which they are deleted.

    One that is killed deletes none itself: TensorFlow leaves the code that it has generated. Does
    nothing where another launcher has started the rank, or where it has been given another place
    for its temporary files.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE, "")
    before = tempfile.gettempdir()
    folder = os.path.join(directory, "tmp")
    if os.path.dirname(directory) != before or len(folder) > _MOST_CHARACTERS:
        return
    os.makedirs(folder, exist_ok=True)
    # What torch has compiled is for the next fit, too.
    with contextlib.suppress(KeyError, OSError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault(_INDUCTOR_VARIABLE, os.path.join(before, f"torchinductor_{user}"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def sweep(parent: str) -> None:
    """Delete folders of ranks of this user whose parents, and they themselves, are surely gone."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError, ValueError, TypeError):
                is_own = entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
                if (
                    is_own
                    and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                    and is_dead(ProcessIdentity(**json.loads(Path(entry, _OWNER_FILE).read_text())))
                    and not _is_running(Path(entry, PID_FILE))
                ):
                    shutil.rmtree(entry, ignore_errors=True)


@functools.lru_cache(maxsize=1)
def _sweep_once(parent: str) -> None:
    sweep(parent)


def _is_running(pid_file: Path) -> bool:
    """Return whether there is a process with the ID that a rank had."""
    try:
        return bool(psutil.pid_exists(int(pid_file.read_text())))
    except FileNotFoundError:
        return False  # it had not begun, and does not without its parent
