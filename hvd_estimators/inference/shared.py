"""Bytes that the executors need for a DataFrame's UDF, sent once. Runs on the driver.

PySpark makes a broadcast variable of every function above 1 MiB, anew each time, and its file stays
on the driver's disk for as long as the application. Here equal bytes are one broadcast variable, as
long as a model or the plan of a DataFrame needs them. Plans live in the JVM, so the JVM is asked
whether one still does, and the file is deleted once none does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from pyspark import Broadcast
from pyspark.sql import DataFrame

from hvd_estimators.inference.documents import as_bytes, chunks, size_of
from hvd_estimators.sessions import is_connect
from hvd_estimators.temporary import LocalFile

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["Parts", "Sent", "SharedBytes"]

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
        The bytes, or a file that holds them.
    digests : tuple of str
        SHA-256 of each part of `PART_BYTES`, in order.
    """

    document: bytes | LocalFile
    digests: tuple[str, ...]

    @classmethod
    def of(cls, document: bytes | LocalFile) -> Hashed:
        """Return a document with its digests."""
        parts = chunks(document, PART_BYTES)
        return cls(document, tuple(hashlib.sha256(part).hexdigest() for part in parts))

    @property
    def digest(self) -> str:
        """SHA-256 of the parts' digests."""
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()


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
        document = hashed.document
        size = size_of(document)
        # Spark Connect has no broadcast variables.
        if size <= _INLINE_BYTES or is_connect(dataset.sparkSession):
            return as_bytes(document)
        context = dataset.sparkSession.sparkContext
        if size <= PART_BYTES:
            sent: Sent = _registry.get(context, hashed.digests[0], lambda: as_bytes(document))
        else:
            parts = (
                _registry.get(context, digest, functools.partial(bytes, part))
                for digest, part in zip(hashed.digests, chunks(document, PART_BYTES), strict=True)
            )
            sent = Parts(hashed.digest, tuple(parts))
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
