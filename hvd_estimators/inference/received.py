"""What the driver has sent to executors, as it comes to their Python workers. Runs on executors.

What was sent in parts is put together in a file, once per executor: the workers map that into their
memory, so that they have one copy between them where a framework can take it from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pyspark import Broadcast, SparkFiles

from hvd_estimators.inference.shared import Parts, Sent

__all__ = ["received"]

_FOLDER = "hvd_estimators-models"
# Models of an executor: those that are predicted with in turn, say. A file that is deleted stays
# with the workers that have it mapped.
_KEPT = 2


@contextlib.contextmanager
def received(sent: Sent) -> Iterator[bytes | Path]:
    """Yield the bytes that `SharedBytes.send` was given, or a file with them.

    The file is there until the block ends; what is mapped of it, for longer.
    """
    if isinstance(sent, bytes):
        yield sent
    elif isinstance(sent, Parts):
        with _file_of(sent) as path:
            yield path
    else:
        yield _value(sent)


def _value(variable: Broadcast[bytes]) -> bytes:
    document = variable.value
    # A worker would keep them in memory beside what is made of them; it can read the file again.
    if getattr(variable, "_path", None):
        vars(variable).pop("_value", None)
    return document


@contextlib.contextmanager
def _file_of(sent: Parts) -> Iterator[Path]:
    # Spark deletes it when the application ends.
    folder = Path(SparkFiles.getRootDirectory() or tempfile.gettempdir()) / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / sent.digest
    with open(folder / "lock", "ab") as lock:
        while True:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                os.utime(path)
            else:
                _put_together(sent, path)
            # Others may come between.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                break
        yield path


def _put_together(sent: Parts, path: Path) -> None:
    """Write a file of the parts, and delete those of others but the newest."""
    partly = path.with_suffix(".partly")
    with open(partly, "wb") as file:
        for part in sent.parts:
            file.write(_value(part))
    others = sorted(path.parent.glob("*[0-9a-f]"), key=lambda p: p.stat().st_mtime, reverse=True)
    os.replace(partly, path)
    for other in others[_KEPT - 1 :]:
        other.unlink()
