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
from typing import IO, TYPE_CHECKING, Any, Union, cast

from pyspark import Broadcast, SparkFiles
from pyspark.sql import DataFrame

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.temp_files import LazyFile, LocalFile
from hvd_estimators.exceptions import PredictionError

if TYPE_CHECKING:
    from pyspark import SparkContext

Payload = Union[bytes, "os.PathLike[str]"]
"""Serialized predictor: bytes, or a file with the bytes."""

_FOLDER = "hvd_estimators-models"


# Number of models that an executor keeps, for example two models that predict alternately. Workers
# that have mapped a file can still read it after its deletion.
_KEPT = 2


@contextlib.contextmanager
def received(sent: Sent) -> Iterator[bytes | Path]:
    """Yield the bytes that were passed to `SharedBytes.send`, or a file with these bytes.

    The file exists until the block ends; memory that is mapped from the file stays valid.
    """
    if isinstance(sent, bytes):
        yield sent
    elif isinstance(sent, Parts):
        with _file_of(sent) as path:
            yield path
    else:
        yield _value(sent)


def _value(variable: Broadcast[bytes]) -> bytes:
    # A variable keeps its bytes in memory, beside the model. A temporary copy of it does not.
    reader: Broadcast[bytes] = object.__new__(Broadcast)
    vars(reader).update(vars(variable))
    return reader.value


@contextlib.contextmanager
def _file_of(sent: Parts) -> Iterator[Path]:
    # Spark deletes this directory when the application ends.
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
            # Changing the lock is not atomic: another worker may delete the file in between.
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                break
        yield path


def _put_together(sent: Parts, path: Path) -> None:
    """Join the parts in a file, and delete the files of other models except the newest."""
    partly = path.with_suffix(".partly")
    with open(partly, "wb") as file:
        for part in sent.parts:
            file.write(_value(part))
    models = sorted(path.parent.glob("*[0-9a-f]"), key=lambda p: p.stat().st_mtime, reverse=True)
    os.replace(partly, path)
    for model in models[_KEPT - 1 :]:
        model.unlink()


PART_BYTES = 64 * 2**20
"""Maximum bytes of a broadcast variable. A driver's heap has 1 GiB by default."""


# Up to this size, bytes are sent within the function, which is cheaper. PySpark broadcasts only
# much larger functions.
_INLINE_BYTES = 2**18


@dataclass(frozen=True)
class Parts:
    """Bytes that are sent in several broadcast variables.

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


Sent = Union[bytes, "Broadcast[bytes]", Parts]
"""Form in which a UDF carries bytes."""


@dataclass(frozen=True)
class Hashed:
    """Bytes to send, with their digests. Hashing GBs takes a while.

    Attributes
    ----------
    document : bytes or LocalFile
        The bytes, or a file with the bytes. A `LazyFile` is not written if all its parts have
        been sent before.
    size : int
        Number of bytes.
    digests : tuple of str
        SHA-256 of each part of `PART_BYTES`, in order.
    """

    document: bytes | LocalFile
    size: int
    digests: tuple[str, ...]

    @classmethod
    def of(cls, document: bytes | LocalFile) -> Hashed:
        """Return bytes, or a file, with their digests."""
        digests = digests_of(document, PART_BYTES)
        return cls(document, digests.size, digests.parts)

    @property
    def digest(self) -> str:
        """SHA-256 of the parts' digests."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    def part(self, index: int) -> bytes:
        """Return a part.

        Raises
        ------
        PredictionError
            If the file is written only now, and the model has changed since it was hashed.
        """
        data = part_of(self.document, index * PART_BYTES, PART_BYTES)
        is_new = isinstance(self.document, LazyFile)
        if is_new and hashlib.sha256(data).hexdigest() != self.digests[index]:
            raise PredictionError(
                "The model changed while it was sent to the executors. Call transform() again when "
                "nothing trains it."
            )
        return data


class SharedBytes:
    """Bytes that a model has sent to executors. A model shares this object with its copies.

    The last bytes sent are kept, so the next `transform` does not send them again.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[tuple[str, ...], Sent]] = {}

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
        if hashed.size <= _INLINE_BYTES or is_connect(dataset.sparkSession):
            return as_bytes(hashed.document)
        context = dataset.sparkSession.sparkContext
        content = (str(context.applicationId), *hashed.digests)
        last, sent = self._last.get(role, ((), b""))
        if last != content:
            parts = tuple(
                _broadcast(context, hashed.part(index)) for index in range(len(hashed.digests))
            )
            sent = parts[0] if len(parts) == 1 else Parts(hashed.digest, parts)
            self._last[role] = (content, sent)
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


_READ_BYTES = 2**20


def as_bytes(document: bytes | os.PathLike[str]) -> bytes:
    """Return the bytes of a payload that may be a file."""
    return document if isinstance(document, bytes) else Path(document).read_bytes()


def part_of(document: bytes | os.PathLike[str], start: int, size: int) -> bytes:
    """Return ``size`` bytes of a payload from ``start``, or fewer at its end."""
    if isinstance(document, bytes):
        return document if len(document) <= size else document[start : start + size]
    with open(document, "rb") as file:
        file.seek(start)
        return file.read(size)


def digests_of(document: bytes | os.PathLike[str], part_bytes: int) -> Digests:
    """Return the digests of a payload's parts. This does not write a `LazyFile` to disk."""
    digests = Digests(part_bytes)
    if isinstance(document, bytes):
        digests.write(document)
    elif isinstance(document, LazyFile):
        document.write(cast("IO[bytes]", digests))
    else:
        with open(document, "rb") as file:
            while piece := file.read(_READ_BYTES):
                digests.write(piece)
    return digests


class Digests(io.RawIOBase):
    """Write-only file that keeps only the SHA-256 of each part and the size.

    Parameters
    ----------
    part_bytes : int
        Bytes of a part; the last part may have fewer.

    Attributes
    ----------
    size : int
        Number of bytes written.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self.truncate(0)

    @property
    def parts(self) -> tuple[str, ...]:
        """The digests, in order."""
        return tuple(part.hexdigest() for part in self._parts)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Hash some bytes, and return their number."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            room = self._part_bytes - self.size % self._part_bytes
            if room == self._part_bytes:
                self._parts.append(hashlib.sha256())
            piece = view[start : start + room]
            self._parts[-1].update(piece)
            self.size += len(piece)
            start += len(piece)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Accept a seek to the start, before a call of `truncate`."""
        if (offset, whence) != (0, os.SEEK_SET):
            raise io.UnsupportedOperation("what was written is not kept")
        return 0

    def truncate(self, size: int | None = 0) -> int:
        """Discard all digests."""
        self.size, self._parts = 0, list[Any]()
        return 0
