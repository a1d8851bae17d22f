"""Errors of a full disk of temporary files, with the folder and the variable that moves it.

Readers, frameworks and user code write temporary files. If the disk is full, each raises
another error, which seldom names the folder. Runs on the driver and on ranks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.storage_errors import Kind, kind_of

_FULL = re.compile("|".join(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)))

_FAILED_WRITE = re.compile(
    r"PytorchStreamWriter failed|iostream error|unexpected pos \d+ vs"  # torch
    r"|\d+ requested and \d+ written"  # NumPy's tofile
)
"""Messages of failed writes that do not include the reason."""

_FULL_BYTES = 2**26
"""Free space below which a failed write without a reason counts as one for want of space."""

_MOST_CHARACTERS = 500


@contextlib.contextmanager
def naming_full_disk() -> Iterator[None]:
    """Convert errors of the block that a full disk causes to a `StoreError`.

    Its message names the folder, the free space and the remedy. A `StoreError` is not changed.

    Raises
    ------
    StoreError
        If a disk is full, or a quota is used up.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        if not _is_full(error):
            raise
        raise StoreError(_message(error)) from error


def _is_full(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if kind_of(error) is Kind.SPACE or _FULL.search(str(error)):
            return True
        if _FAILED_WRITE.search(str(error)) and _free_bytes(_temporary_folder()) < _FULL_BYTES:
            return True
        error = error.__cause__
    return False


def _message(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
    temporary = _temporary_folder()
    free = _free_bytes(temporary) / 1e6
    file = getattr(error, "filename", None)
    folder = os.path.dirname(file) if isinstance(file, str) else temporary
    found = f"No space is left on a disk, or a quota is used up ({text})."
    if not _same_disk(folder, temporary):
        return f"{found} Free space in {folder!r}, or write the file elsewhere."
    return (
        f"{found} Temporary files are in {temporary!r}, whose disk has {free:,.1f} MB left. "
        "Free space there, or set the environment variable TMPDIR to a folder with more space (on "
        "Spark: spark.executorEnv.TMPDIR)."
    )


def _temporary_folder() -> str:
    # Python itself passes over a TMPDIR that is full when it first needs the folder.
    return tempfile.tempdir or os.environ.get("TMPDIR") or tempfile.gettempdir()


def _same_disk(folder: str, other: str) -> bool:
    while folder and not os.path.exists(folder):  # the writer may have deleted its folder
        folder = os.path.dirname(folder)
    try:
        return os.stat(folder or ".").st_dev == os.stat(other).st_dev
    except OSError:
        return True


def _free_bytes(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return math.nan
