"""A file of a remote store that is open for reading, and reads on after an error."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Collection
from typing import IO, Any

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.retries import with_retries

__all__ = ["RemoteFile"]


class RemoteFile(io.RawIOBase):
    """Reads a file; where the storage does not answer, it is opened anew and read on.

    Parameters
    ----------
    open_file : callable
        Opens the file, at its beginning.
    path : str
        Its path, for messages.
    secrets : collection of str
        Texts that no message may hold.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    StoreError
        If it cannot be read, or has become another one since it was opened.
    """

    def __init__(
        self, open_file: Callable[[], IO[bytes]], path: str, secrets: Collection[str] = ()
    ) -> None:
        super().__init__()
        self._open_file = open_file
        self._what = f"reading {path!r}"
        self._secrets = secrets
        self._file: Any = None
        self._resume_at = 0
        self._file = with_retries(open_file, self._what, secrets)
        self._size = int(self._file.seek(0, os.SEEK_END) or self._file.tell())
        self._file.seek(0)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._size

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return int(self._opened().tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}[whence]
        position = min(start + offset, self._size)
        self._opened().seek(position)
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes; none at the end."""
        file = self._opened()
        wanted = -1 if size is None else size
        position = file.tell()
        try:
            return bytes_of(file.read(wanted))
        except Exception as error:
            return self._read_on(error, position, wanted)

    def readall(self) -> bytes:
        """Return all that is left."""
        return self.read(-1)

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as fit into a buffer, and return how many there were."""
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the file."""
        if not self.closed and self._file is not None:
            self._discard()
        super().close()

    def _read_on(self, error: Exception, position: int, size: int) -> bytes:
        failed: list[Exception] = [error]

        def read() -> bytes:
            if failed:
                raise failed.pop()
            try:
                if self._file is None:
                    self._reopen()
                return bytes_of(self._file.read(size))
            except Exception:
                self._discard()
                raise

        self._resume_at = position
        self._discard()
        return with_retries(read, self._what, self._secrets)

    def _reopen(self) -> None:
        self._file = self._open_file()
        size = int(self._file.seek(0, os.SEEK_END) or self._file.tell())
        if size != self._size:
            raise StoreError(
                f"The store failed at {self._what}: it has become another file meanwhile "
                f"({size} bytes instead of {self._size})."
            )
        self._file.seek(self._resume_at)

    def _discard(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(Exception):
            file.close()

    def _opened(self) -> Any:
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        if self._file is None:  # what was read last has failed
            with_retries(self._reopen, self._what, self._secrets)
        return self._file


def bytes_of(content: Any) -> bytes:
    """Return what was read as bytes; a copy only where it is something else."""
    return content if isinstance(content, bytes) else bytes(content)
