"""Broadcast of models to executors, each part once.

Each executor joins the parts of a large model in one file. Its Python workers map the file into
memory, so they share one copy if the framework can load from mapped memory.

PySpark makes a new broadcast variable each time it sends a function above 1 MiB. The variable's
file stays on the driver's disk until the application ends. Here, equal bytes share one broadcast
variable as long as a model or a DataFrame's plan needs it. Plans live in the JVM, so a weak
reference in the JVM shows whether a plan needs the variable. Files of unused variables are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
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


# The JVM notices unused plans only when it collects garbage, which may be hours apart. `sweep`
# requests a collection when files of this many bytes may be unused. After that, it requests the
# next one only when twice as many bytes may be unused as the last collection left.
_WAITING_BYTES = 64 * 2**20


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
        self._last: dict[str, Sent] = {}

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
        parts = tuple(
            _registry.get(context, digest, functools.partial(hashed.part, index))
            for index, digest in enumerate(hashed.digests)
        )
        sent: Sent = parts[0] if len(parts) == 1 else Parts(hashed.digest, parts)
        self._last[role] = sent
        return sent

    def __reduce__(self) -> Any:
        return SharedBytes, ()


@dataclass(frozen=True)
class _File:
    """File of a broadcast variable, and a weak reference in the JVM to the variable."""

    key: tuple[str, str]
    path: str
    size: int
    reference: Any
    context: SparkContext

    def is_needed(self) -> bool:
        if self.context._jsc is None:
            return False
        return self.reference.get() is not None


class _Registry:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        # A model holds the Python variable; a plan in the JVM holds the variable's counterpart.
        self._sent: weakref.WeakValueDictionary[tuple[str, str], Broadcast[bytes]] = (
            weakref.WeakValueDictionary()
        )
        self._files: list[_File] = []
        self._left_bytes = 0

    def get(
        self, context: SparkContext, digest: str, read: Callable[[], bytes]
    ) -> Broadcast[bytes]:
        """Return the variable for a digest; read and broadcast the bytes if none exists yet."""
        key = (str(context.applicationId), digest)
        with self._lock:
            sent = self._sent.get(key)
            if sent is not None:
                return sent
            self.sweep(context)
            document = read()
            broadcast = context.broadcast(document)
            assert context._jvm is not None
            reference = context._jvm.java.lang.ref.WeakReference(broadcast._jbroadcast)
            path = broadcast._path
            self._sent[key] = broadcast
            self._files.append(_File(key, path, len(document), reference, context))
            return broadcast

    def sweep(self, context: SparkContext, *, collect: bool = False) -> None:
        """Delete the files of variables that are no longer needed."""
        with self._lock:
            waiting = self._waiting_bytes()
            if collect or waiting > max(_WAITING_BYTES, 2 * self._left_bytes):
                assert context._jvm is not None
                context._jvm.java.lang.System.gc()
                self._delete()
                self._left_bytes = self._waiting_bytes()
            else:
                self._delete()

    def _waiting_bytes(self) -> int:
        return sum(file.size for file in self._files if file.key not in self._sent)

    def _delete(self) -> None:
        needed = []
        for file in self._files:
            if file.key in self._sent or file.is_needed():
                needed.append(file)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
        self._files = needed


_registry = _Registry()


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
