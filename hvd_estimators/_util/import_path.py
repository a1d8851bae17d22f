"""Import paths of Python processes: nothing that other users of the machine can write to.

Python runs ``sitecustomize.py`` of any folder in ``PYTHONPATH``. So a user who can write to one
of these folders runs code in the process.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import logging
import os
import pwd
import stat
import sys
from collections.abc import Sequence

logger = logging.getLogger(__name__)


def python_code(code: str, executable: str = sys.executable) -> list[str]:
    """Return a command that runs code without the working directory in its import path."""
    return [executable, "-u", "-P", "-c", code]


def python_module(module: str, executable: str = sys.executable) -> list[str]:
    """Return a command that runs a module as ``python -m`` does, without the working directory."""
    return [executable, "-u", "-P", "-m", module]


def python_path(*paths: Sequence[str], trusted: Sequence[str] = ()) -> str:
    """Join import paths for ``PYTHONPATH``, without what other users can write to.

    Entries of this process's own ``PYTHONPATH`` stay, because its Python has started with them.
    A warning names each other entry that is left out.

    Parameters
    ----------
    *paths : sequence of str
        Import paths, of this process or of one on another machine. Relative entries start at the
        working directory.
    trusted : sequence of str
        Folders that stay, with all that they contain, such as Spark's folder of added files.
    """
    entries = dict.fromkeys(os.path.abspath(entry) for path in paths for entry in path)
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = {*map(os.path.abspath, own)}
    folders = [f"{os.path.abspath(folder)}{os.sep}" for folder in trusted]
    return os.pathsep.join(
        entry
        for entry in entries
        if entry in kept
        or f"{entry}{os.sep}".startswith(tuple(folders))
        or (os.path.exists(entry) and _is_safe(entry))
    )


def _is_safe(entry: str) -> bool:
    with contextlib.suppress(OSError):
        if _only_own(entry):
            return True
    # The Python of a rank finds its own packages by itself.
    if not entry.startswith((sys.prefix, sys.base_prefix)):
        _warn(entry)
    return False


@functools.cache
def _warn(entry: str) -> None:
    logger.warning(
        "%s is left out of the ranks' import path, because other users can write to it or to a "
        "folder above it. If ranks need modules there, run chmod go-w on these folders, or add the "
        "modules with spark.submit.pyFiles (--py-files).",
        entry,
    )


def _only_own(path: str, *, is_above: bool = False) -> bool:
    """Return whether only this user and root can change what an absolute path names.

    Parameters
    ----------
    path : str
        A file, folder or link.
    is_above : bool
        Whether the path is a folder above another one. Others may create files in it if they
        cannot replace this user's, as in ``/tmp``.
    """
    status, folder = os.lstat(path), os.path.dirname(path)
    if status.st_uid not in (0, os.geteuid()):
        return False
    if folder != path and not _only_own(folder, is_above=True):
        return False
    if stat.S_ISLNK(status.st_mode):
        target = os.path.join(os.path.realpath(folder), os.readlink(path))
        return _only_own(os.path.normpath(target), is_above=is_above)
    others = status.st_mode & stat.S_IWOTH
    group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return not (others or group) or (is_above and bool(status.st_mode & stat.S_ISVTX))


def _is_own_group(number: int) -> bool:
    """Return whether a group is the one of this user alone, which many systems create."""
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        is_own = (group.gr_name, group.gr_gid) == (user.pw_name, user.pw_gid)
        return is_own and {*group.gr_mem} <= {user.pw_name}
    return False
