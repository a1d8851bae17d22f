"""Payloads of predictors: bytes or files, and their digests. Imports no PySpark."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Union, cast

from hvd_estimators._util.temp_files import LazyFile

if TYPE_CHECKING:
    pass

__all__ = ["Digests", "Payload", "as_bytes", "digests_of", "part_of"]

Payload = Union[bytes, "os.PathLike[str]"]
"""Serialized predictor: bytes, or a file with the bytes."""


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
