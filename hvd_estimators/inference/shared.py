"""Bytes that the executors need for a DataFrame's UDF, sent once. Runs on the driver.

PySpark makes a broadcast variable of every function above 1 MiB, anew each time, and its file stays
on the driver's disk for as long as the application. Here equal bytes are one broadcast variable, as
long as a model or the plan of a DataFrame needs them. Plans live in the JVM, so the JVM is asked
whether one still does, and the file is deleted once none does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from pyspark import Broadcast
from pyspark.sql import DataFrame

from hvd_estimators.temporary import LocalFile

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["Parts", "Sent", "SharedBytes", "as_bytes", "chunks", "size_of"]

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
        SHA-256 of all of them.
    parts : tuple of Broadcast
        The parts, in order.
    """

    digest: str
    parts: tuple[Broadcast[bytes], ...]


Sent = Union[bytes, "Broadcast[bytes]", Parts]
"""What takes the place of bytes in a UDF."""


class SharedBytes:
    """What a model has sent to executors. Held by the model and by its copies.

    What was sent last is kept, so that the next `transform` need not send it again.
    """

    def __init__(self) -> None:
        self._last: dict[str, Sent] = {}

    def send(self, dataset: DataFrame, role: str, document: bytes | LocalFile) -> Sent:
        """Return what takes the place of bytes in a UDF on a DataFrame; see `received`.

        Parameters
        ----------
        dataset : DataFrame
            Its application needs them.
        role : str
            What they are; of each role one is kept.
        document : bytes or LocalFile
            The bytes, or a file that holds them.
        """
        size = size_of(document)
        # Spark Connect has no broadcast variables.
        if size <= _INLINE_BYTES or not hasattr(dataset, "_jdf"):
            return as_bytes(document)
        context = dataset.sparkSession.sparkContext
        if size <= PART_BYTES:
            sent: Sent = _registry.get(context, as_bytes(document))
        else:
            digest = hashlib.sha256()
            parts = []
            for part in chunks(document, PART_BYTES):
                digest.update(part)
                parts.append(_registry.get(context, bytes(part)))
            sent = Parts(digest.hexdigest(), tuple(parts))
        self._last[role] = sent
        return sent

    def __reduce__(self) -> Any:
        return SharedBytes, ()


def as_bytes(document: bytes | os.PathLike[str]) -> bytes:
    """Return the bytes of a document that may be a file."""
    return document if isinstance(document, bytes) else Path(document).read_bytes()


def size_of(document: bytes | LocalFile) -> int:
    """Return how many bytes a document has."""
    return len(document) if isinstance(document, bytes) else os.path.getsize(document)


def chunks(document: bytes | LocalFile, size: int) -> Iterator[bytes | memoryview]:
    """Yield a document in pieces of a size."""
    if isinstance(document, bytes):
        view = memoryview(document)
        yield from (view[start : start + size] for start in range(0, len(view), size))
        return
    with open(document, "rb") as file:
        while piece := file.read(size):
            yield piece


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

    def get(self, context: SparkContext, document: bytes) -> Broadcast[bytes]:
        key = (str(context.applicationId), hashlib.sha256(document).hexdigest())
        with self._lock:
            found = self._sent.get(key)
            if found is not None:
                return found
            self.sweep(context)
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
