"""Large content as a file of this machine, which is gone when nobody holds it any more."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import weakref
from typing import IO, Any

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.files import Files

__all__ = ["CHUNK_BYTES", "HashingWriter", "LocalFile", "copy_from", "fetch"]

CHUNK_BYTES = 2**22
"""What is copied at a time."""


class LocalFile:
    """A temporary file that is deleted with the object. It does not cross between processes.

    Attributes
    ----------
    path : str
        The file, which is not there yet, in a folder of its own.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="hvd_estimators-")
        self.path = os.path.join(directory, "content")
        self._delete = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    def close(self) -> None:
        """Delete the file."""
        self._delete()


class HashingWriter(io.RawIOBase):
    """Writes to a file and computes the SHA-256 digest of what it writes."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of some bytes."""
        self._digest.update(data)
        written: int = self._file.write(data)
        return written


def copy_from(store: Files, path: str, target: IO[bytes], digest: str | None = None) -> str:
    """Copy a file of the store to one that nobody else can change, and return its digest.

    Parameters
    ----------
    store : Files
        The store.
    path : str
        The file.
    target : file
        Open for writing.
    digest : str, optional
        SHA-256 of what the file has to hold.

    Raises
    ------
    StoreError
        If there is no such file, or it holds something else.
    """
    writer, size = HashingWriter(target), 0
    try:
        with store.open(path) as source:
            while chunk := source.read(CHUNK_BYTES):
                size += writer.write(chunk)
    except OSError as error:
        raise StoreError(f"The store holds no file {path!r} ({error}).") from error
    if digest is not None and writer.digest != digest:
        raise StoreError(
            f"{path!r} holds something else than what was written there ({size} bytes). "
            "Set a store of which all machines see the same, and that nobody else changes."
        )
    return writer.digest


def fetch(store: Files, path: str, digest: str | None = None) -> tuple[LocalFile, str]:
    """Return a local copy of a file of the store and its digest; see `copy_from`."""
    local = LocalFile()
    with open(local.path, "wb") as file:
        found = copy_from(store, path, file, digest)
    return local, found
