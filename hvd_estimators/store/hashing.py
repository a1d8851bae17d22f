"""Local copies of a store's files, and their digests."""

from __future__ import annotations

import hashlib
import io
from typing import IO, Any

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.files import Files

__all__ = ["CHUNK_BYTES", "HashingWriter", "copy_from", "fetch"]

CHUNK_BYTES = 2**22
"""Bytes copied per read."""


class HashingWriter(io.RawIOBase):
    """File wrapper that computes the SHA-256 digest of the written bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the bytes written so far."""
        return self._digest.hexdigest()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all bytes of ``data``."""
        self._digest.update(data)
        written: int = self._file.write(data)
        return written


def copy_from(store: Files, path: str, target: IO[bytes], digest: str | None = None) -> str:
    """Copy a file of the store to a private file and return its digest.

    Parameters
    ----------
    store : Files
        The store.
    path : str
        The file.
    target : file
        Open for writing. No other process may be able to change it.
    digest : str, optional
        Expected SHA-256 digest of the file.

    Raises
    ------
    StoreError
        If the file does not exist, or if its digest differs from ``digest``.
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
