"""Files of a store: what is asked of its filesystem, tried again where that fails for a while."""

from __future__ import annotations

import contextlib
import datetime
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, ClassVar, TypeVar

import fsspec

from hvd_estimators.exceptions import HvdEstimatorsError, StoreError
from hvd_estimators.store.retries import with_retries
from hvd_estimators.store.storage_errors import secret_values

__all__ = ["Files"]

_REQUESTS = 8
"""Requests for parts of one file at a time."""

T = TypeVar("T")


class Files(ABC):
    """Reads, writes, lists and deletes files, by one filesystem of fsspec's. Runs on both sides.

    Attributes
    ----------
    storage_options : dict
        Passed to the filesystem.
    """

    storage_options: dict[str, Any]

    creates_exclusively: ClassVar[bool] = False
    """Whether of several processes that call `write_new` at the same time one alone succeeds."""

    @property
    @abstractmethod
    def fs(self) -> fsspec.AbstractFileSystem:
        """The fsspec filesystem that serves this store's paths."""

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """Return a path in the form in which Python readers on all machines open it.

        That is a URL with its scheme, or for a `LocalStore` an absolute path. `fs` opens it.
        """

    def full_path(self, listed: str) -> str:
        """Return the form of `get_full_path` for a path as `fs` lists it, without a scheme.

        By default the path as it is.
        """
        return listed

    def local_path(self, path: str) -> str | None:
        """Return the path by which the operating system opens a file.

        None, the default, where only `fs` can open it.
        """
        return None

    def url(self, path: str) -> str:
        """Return a path as a URL by which other packages of Python open it."""
        local = self.local_path(path)
        # Not percent-encoded: fsspec and Petastorm take the characters as they are.
        return path if local is None else f"file://{local}"

    def writable_path(self, path: str) -> str | None:
        """Return the path by which the operating system writes a file in place.

        None where files can only be written as a whole. By default `local_path`.
        """
        return self.local_path(path)

    @contextlib.contextmanager
    @abstractmethod
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for writing that appears whole when the block ends, or not at all."""

    @property
    def secrets(self) -> frozenset[str]:
        """The texts of ``storage_options`` that no message may hold."""
        return secret_values(self.storage_options)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists.

        Raises
        ------
        StoreError
            If the storage does not tell.
        """
        return self._info(path) is not None

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading; several threads may, each has a position of its own.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        StoreError
            If it cannot be read.
        """
        file: IO[bytes] = self._retried(lambda: self.fs.open(path, "rb"), f"reading {path!r}")
        return file

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises
        ------
        StoreError
            If there is no such file, or it cannot be read.
        """
        try:
            return bytes(self._retried(lambda: self.fs.cat_file(path), f"reading {path!r}"))
        except HvdEstimatorsError:
            raise
        except OSError as error:
            raise StoreError(f"The store holds no file {path!r} ({error}).") from error

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        """Return parts of a file, each by one request, several at a time.

        Parameters
        ----------
        path : str
            The file.
        ranges : sequence of (int, int or None)
            First byte of each part, and the byte after its last; None: up to the end. A negative
            first byte counts from the end: ``(-8, None)`` are the last eight bytes, or all of a
            file with less. Parts end where the file ends.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        StoreError
            If it cannot be read.
        """
        return self._retried(lambda: self._ranges(path, ranges), f"reading {path!r}")

    def _ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        fs = self.fs
        starts = [start for start, _ in ranges]
        if min(starts, default=0) < 0 and not self._takes_suffixes():
            size = int(fs.size(path))
            starts = [start if start >= 0 else max(size + start, 0) for start in starts]
        stops = [stop for _, stop in ranges]
        if fs.async_impl:
            found = fs.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
        elif len(starts) == 1:
            found = [fs.cat_file(path, starts[0], stops[0])]
        else:
            with ThreadPoolExecutor(min(len(starts), _REQUESTS) or 1) as pool:
                found = list(pool.map(fs.cat_file, [path] * len(starts), starts, stops))
        return [bytes(part) for part in found]

    def _takes_suffixes(self) -> bool:
        """Return whether a request can ask for the end of a file whose size is not known."""
        return False

    def modified(self, path: str) -> datetime.datetime | None:
        """Return when a file was written, by the store's clock, in UTC.

        None if there is no such file, or the store does not note it.
        """

        def ask() -> Any:
            self._forget_listings(path)
            try:
                return self.fs.modified(path)
            except (FileNotFoundError, NotImplementedError):
                return None

        found = self._retried(ask, f"looking for {path!r}")
        # Without a zone it is local time, as everywhere in Python.
        is_time = isinstance(found, datetime.datetime)
        return found.astimezone(datetime.timezone.utc) if is_time else None

    def write_text(self, path: str, text: str) -> None:
        """Write a file that appears whole or not at all."""
        with self.open_atomic(path) as file:
            file.write(text.encode())

    def write_new(self, path: str, text: str) -> bool:
        """Write a file, whole, if there is none, and return whether it was written.

        Two processes may both succeed, unless `creates_exclusively`.
        """
        if self.exists(path):
            return False
        self.write_text(path, text)
        return True

    def find(self, path: str) -> list[str]:
        """Return the full paths of all files below a path, in the order of their names.

        A file is below itself; there is nothing below a path that does not exist.

        Raises
        ------
        StoreError
            If the storage does not tell.
        """
        fs = self.fs
        # Walking a tree, fsspec leaves out by default what it cannot list.
        walks = type(fs).find is fsspec.AbstractFileSystem.find
        options = {"on_error": "raise"} if walks else {}

        def list_files() -> list[str]:
            self._forget_listings(path)
            try:
                # Hadoop's connectors mark directories by empty objects.
                return [file for file in fs.find(path, **options) if not file.endswith("/")]
            except (FileNotFoundError, NotADirectoryError):
                if self._info(path) is None:
                    return []
                raise

        return sorted(map(self.full_path, self._retried(list_files, f"listing {path!r}")))

    def names(self, path: str) -> list[str]:
        """Return the names of what is in a directory, in alphabetical order.

        There is nothing in a directory that does not exist, and in a file.

        Raises
        ------
        StoreError
            If the storage does not tell.
        """

        def list_names() -> list[str]:
            self._forget_listings(path)
            try:
                entries = self.fs.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            own = self._path_in_fs(path).rstrip("/")
            return [entry for entry in entries if entry.rstrip("/") != own]

        listed = self._retried(list_names, f"listing {path!r}")
        return sorted(posixpath.basename(entry.rstrip("/")) for entry in listed)

    def delete(self, path: str) -> None:
        """Delete a file or directory; nothing happens where there is none.

        Raises
        ------
        StoreError
            If it cannot be deleted.
        """

        def remove() -> None:
            info = self._info(path)
            # A file not by rm, which takes some characters for patterns.
            with contextlib.suppress(FileNotFoundError):  # somebody else did it meanwhile
                if info is not None and info["type"] == "directory":
                    self.fs.rm(path, recursive=True)
                elif info is not None:
                    self.fs.rm_file(path)

        self._retried(remove, f"deleting {path!r}")

    def move_folder(self, source: str, target: str) -> None:
        """Move a folder to a path where nothing is yet.

        One rename where the storage renames folders. Object stores copy the files, several at the
        same time, so that others may see a part of them for a while.

        Raises
        ------
        StoreError
            If a file cannot be moved.
        """
        fs = self.fs
        renames = type(fs).mv is not fsspec.AbstractFileSystem.mv
        files = [] if renames else self.find(source)

        def move() -> None:
            self._forget_listings(source)
            if not renames:
                copies = [target + file.removeprefix(source) for file in files]
                fs.copy(files, copies)
            elif self._info(source) is not None:  # an earlier try may have moved it
                fs.makedirs(posixpath.dirname(self._path_in_fs(target)), exist_ok=True)
                fs.mv(source, target, recursive=True)

        self._retried(move, f"moving {source!r} to {target!r}")
        if not renames:
            self.delete(source)

    def delete_empty(self, path: str) -> None:
        """Delete a directory if there is nothing in it."""
        info = self._info(path)
        if info is not None and info["type"] == "directory" and not self.names(path):
            self._retried(lambda: self.fs.rmdir(path), f"deleting {path!r}")

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return what fsspec tells of a file or directory; None where there is none."""

        def ask() -> dict[str, Any] | None:
            self._forget_listings(path)
            try:
                found: dict[str, Any] = self.fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return found

        return self._retried(ask, f"looking for {path!r}")

    def _path_in_fs(self, path: str) -> str:
        """Return a path as `fs` lists it; see `full_path`."""
        return path

    def _forget_listings(self, path: str) -> None:
        """Let the filesystem ask the storage: others may have changed what it has listed."""
        self.fs.invalidate_cache(path)

    def _retried(self, action: Callable[[], T], what: str) -> T:
        return with_retries(action, what, self.secrets)
