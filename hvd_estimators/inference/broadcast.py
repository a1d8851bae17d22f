"""Broadcast of models to executors, each part once.

Each executor joins the parts of a large model in one file. Its Python workers map the file into
memory, so they share one copy if the framework can load from mapped memory.

A model holds its broadcast variables, and so do the plans of the DataFrames that it has made. Plans
live in the JVM. When both are gone, Spark frees the variable's memory, and its file is deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from pyspark import Broadcast, SparkFiles
from pyspark.sql import DataFrame

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError

if TYPE_CHECKING:
    from pyspark import SparkContext

Payload = Union[bytes, "os.PathLike[str]"]
"""Serialized predictor: bytes, or a file with the bytes."""

PART_BYTES = 64 * 2**20
"""Maximum bytes of a broadcast variable. A driver's heap has 1 GiB by default."""

# Up to this size, bytes are sent within the function, which is cheaper. PySpark broadcasts only
# much larger functions.
_INLINE_BYTES = 2**18

# Spark's server takes messages of 128 MiB, and a query has more than the model.
_MOST_CONNECT_BYTES = 120 * 2**20

_FOLDER = "hvd_estimators-models"

# Number of files that an executor keeps, for example for two models that predict alternately.
# Workers that have mapped a file can still read it after its deletion.
_KEPT = 2


@dataclass(frozen=True)
class Hashed:
    """Bytes to send, with their digest.

    Attributes
    ----------
    document : bytes or LocalFile
        The bytes, or a file with the bytes.
    size : int
        Number of bytes.
    digest : str
        SHA-256 of the bytes.
    """

    document: bytes | LocalFile
    size: int
    digest: str

    @classmethod
    def of(cls, document: bytes | LocalFile) -> Hashed:
        """Return bytes, or a file, with their digest."""
        with _opened(document) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(document, file.seek(0, os.SEEK_END), digest)


@dataclass(frozen=True)
class Parts:
    """Bytes that are sent in broadcast variables.

    Spark briefly holds all bytes of a variable in the JVM's heap.

    Attributes
    ----------
    digest : str
        `Hashed.digest`, which names the joined file.
    parts : tuple of Broadcast
        The parts, in order.
    """

    digest: str
    parts: tuple[Broadcast[bytes], ...]


Sent = bytes | Parts
"""Form in which a UDF carries bytes."""


class SharedBytes:
    """Bytes that a model has sent to executors. A model shares this object with its copies.

    The last bytes sent are kept, so the next `transform` does not send them again.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, Parts]] = {}

    def send(self, dataset: DataFrame, role: str, hashed: Hashed) -> Sent:
        """Broadcast bytes, and return the form in which a UDF carries them; see `received`.

        Small bytes are returned unchanged.

        Parameters
        ----------
        dataset : DataFrame
            A DataFrame of the application that needs the bytes.
        role : str
            Purpose of the bytes. For each role, only the last bytes are kept.
        hashed : Hashed
            The bytes.
        """
        # Spark Connect has no broadcast variables.
        if is_connect(dataset.sparkSession) and hashed.size > _MOST_CONNECT_BYTES:
            raise ParamError(
                f"The model has {hashed.size / 2**20:.0f} MiB, and Spark Connect sends at most 128 "
                "MiB with a query. Predict in a Spark application on the cluster: model.save(path) "
                "there, and load it with a classic session."
            )
        if hashed.size <= _INLINE_BYTES or is_connect(dataset.sparkSession):
            return as_bytes(hashed.document)
        context = dataset.sparkSession.sparkContext
        application, sent = self._last.get(role, ("", Parts("", ())))
        if (application, sent.digest) != (context.applicationId, hashed.digest):
            with _opened(hashed.document) as file:
                parts = [
                    _broadcast(context, part) for part in iter(lambda: file.read(PART_BYTES), b"")
                ]
            sent = Parts(hashed.digest, tuple(parts))
            self._last[role] = context.applicationId, sent
        return sent

    def __reduce__(self) -> Any:
        return SharedBytes, ()


def _broadcast(context: SparkContext, data: bytes) -> Broadcast[bytes]:
    """Return a variable whose file is deleted when neither Python nor a plan needs it."""
    variable = context.broadcast(data)
    assert context._jvm is not None
    # PySpark would keep the file until the application ends.
    tracker = context._jvm.org.apache.commons.io.FileCleaningTracker()
    tracker.track(variable._path, variable._jbroadcast)
    tracker.exitWhenFinished()
    return variable


def as_bytes(document: bytes | os.PathLike[str]) -> bytes:
    """Return the bytes of a payload that may be a file."""
    return document if isinstance(document, bytes) else Path(document).read_bytes()


def _opened(document: bytes | os.PathLike[str]) -> io.BytesIO | io.BufferedReader:
    return io.BytesIO(document) if isinstance(document, bytes) else open(document, "rb")


@contextlib.contextmanager
def received(sent: Sent) -> Iterator[bytes | Path]:
    """Yield the bytes that were passed to `SharedBytes.send`, or a file with these bytes.

    The file exists until the block ends; memory that is mapped from the file stays valid.
    """
    if isinstance(sent, bytes):
        yield sent
        return
    # Spark deletes this directory when the application ends.
    folder = Path(SparkFiles.getRootDirectory() or tempfile.gettempdir()) / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / sent.digest
    with open(folder / "lock", "ab") as lock:
        while True:
            # Workers load a model at the same time, and the first one alone writes its file.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                break
            # Changing the lock is not atomic: another worker may write or delete the file before.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _put_together(sent, path)
        os.utime(path)
        yield path


def _put_together(sent: Parts, path: Path) -> None:
    """Join the parts in a file, and delete the files of other models except the newest."""
    partly = path.with_suffix(".partly")
    with open(partly, "wb") as file:
        for part in sent.parts:
            # A variable keeps its bytes in memory, beside the model. A temporary copy does not.
            reader: Broadcast[bytes] = object.__new__(Broadcast)
            vars(reader).update(vars(part))
            file.write(reader.value)
    models = sorted(path.parent.glob("*[0-9a-f]"), key=lambda p: p.stat().st_mtime, reverse=True)
    os.replace(partly, path)
    for model in models[_KEPT - 1 :]:
        model.unlink()
