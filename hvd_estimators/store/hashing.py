"""Copies of a store's files on this machine, and their digests."""

from __future__ import annotations

import hashlib
import io
from typing import IO, Any

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.files import Files

__all__ = ["CHUNK_BYTES", "HashingWriter", "copy_from", "fetch"]

CHUNK_BYTES = 2**22
"""What is copied at a time."""


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
