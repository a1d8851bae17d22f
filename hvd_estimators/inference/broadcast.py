"""Broadcast of models to executors, each part once.

What was sent in parts is put together in a file, once per executor: the workers map that into their
memory, so that they have one copy between them where a framework can take it from there.

PySpark makes a broadcast variable of every function above 1 MiB, anew each time, and its file stays
on the driver's disk for as long as the application. Here equal bytes are one broadcast variable, as
long as a model or the plan of a DataFrame needs them. Plans live in the JVM, so the JVM is asked
whether one still does, and the file is deleted once none does.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from pyspark import Broadcast, SparkFiles
from pyspark.sql import DataFrame

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.temp_files import LazyFile, LocalFile
from hvd_estimators.exceptions import PredictionError
from hvd_estimators.inference.payload import as_bytes, digests_of, part_of

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["Parts", "Sent", "SharedBytes", "received"]


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


PART_BYTES = 64 * 2**20


"""Bytes of a broadcast variable, at most. A driver's heap has 1 GiB by default."""


# Less is cheaper to send with the function itself, and well below where PySpark broadcasts.
_INLINE_BYTES = 2**18


# The JVM notices that plans are gone when it collects garbage, which may be hours apart. It is told
# to do so when this much is waiting for it, and then only when twice as much is as was left.
_WAITING_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Parts:
    """Bytes that are sent in parts: of one variable Spark holds all in the JVM's heap for a moment.

    Attributes
    ----------
    digest : str
        `Hashed.digest`, which names them.
    parts : tuple of Broadcast
        The parts, in order.
    """

    digest: str
    parts: tuple[Broadcast[bytes], ...]


Sent = Union[bytes, "Broadcast[bytes]", Parts]


"""What takes the place of bytes in a UDF."""


@dataclass(frozen=True)
class Hashed:
    """Bytes that are to be sent, and what tells them from others: of GBs that takes a while.

    Attributes
    ----------
    document : bytes or LocalFile
        The bytes, or a file that holds them. One that is written when it is read is not written
        where all of it has been sent before.
    size : int
        How many bytes there are.
    digests : tuple of str
        SHA-256 of each part of `PART_BYTES`, in order.
    """

    document: bytes | LocalFile
    size: int
    digests: tuple[str, ...]

    @classmethod
    def of(cls, document: bytes | LocalFile) -> Hashed:
        """Return a document with its digests."""
        found = digests_of(document, PART_BYTES)
        return cls(document, found.size, found.parts)

    @property
    def digest(self) -> str:
        """SHA-256 of the parts' digests."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()

    def part(self, index: int) -> bytes:
        """Return a part.

        Raises
        ------
        PredictionError
            If it is written now, and the model has changed since.
        """
        found = part_of(self.document, index * PART_BYTES, PART_BYTES)
        is_new = isinstance(self.document, LazyFile)
        if is_new and hashlib.sha256(found).hexdigest() != self.digests[index]:
            raise PredictionError(
                "The model changed while it was sent to the executors. Call transform() again when "
                "nothing trains it."
            )
        return found


class SharedBytes:
    """What a model has sent to executors. Held by the model and by its copies.

    What was sent last is kept, so that the next `transform` need not send it again.
    """

    def __init__(self) -> None:
        self._last: dict[str, Sent] = {}

    def send(self, dataset: DataFrame, role: str, hashed: Hashed) -> Sent:
        """Return what takes the place of bytes in a UDF on a DataFrame; see `received`.

        Parameters
        ----------
        dataset : DataFrame
            Its application needs them.
        role : str
            What they are; of each role one is kept.
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
    """A broadcast variable's file, and the JVM's weak reference to the variable."""

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
        # A model holds the variable itself, a plan of the JVM's its counterpart there.
        self._sent: weakref.WeakValueDictionary[tuple[str, str], Broadcast[bytes]] = (
            weakref.WeakValueDictionary()
        )
        self._files: list[_File] = []
        self._left_bytes = 0

    def get(
        self, context: SparkContext, digest: str, read: Callable[[], bytes]
    ) -> Broadcast[bytes]:
        """Return the variable of bytes with a digest, which are read if there is none yet."""
        key = (str(context.applicationId), digest)
        with self._lock:
            found = self._sent.get(key)
            if found is not None:
                return found
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
        """Delete the files of variables that nothing needs any more."""
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
