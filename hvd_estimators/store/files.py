"""File operations of a store, with retries of transient errors, and verified local copies."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, TypeVar

import fsspec

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import HvdEstimatorsError, StoreError
from hvd_estimators.store.redaction import secret_values
from hvd_estimators.store.retries import TruncatedResponse, with_retries
from hvd_estimators.store.storage_errors import Kind, kind_of, naming_full_disk, text_of

CHUNK_BYTES = 2**22
"""Bytes copied per read."""

_REQUESTS = 8
"""Maximum parallel requests for ranges of one file."""

T = TypeVar("T")


class ListedFile(NamedTuple):
    """A file as the storage lists it.

    Attributes
    ----------
    path : str
        Full path.
    is_regular : bool
        False for pipes, sockets and devices, and for links to folders.
    """

    path: str
    is_regular: bool = True


def is_missing(error: BaseException | None) -> bool:
    """Return whether an error of reading a file means that there is no such file."""
    if isinstance(error, StoreError):
        error = error.__cause__
    return isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))


class Files(ABC):
    """File operations on an fsspec filesystem. Runs on the driver and on ranks.

    Attributes
    ----------
    storage_options : dict
        Options for the filesystem.
    """

    storage_options: dict[str, Any]

    @property
    @abstractmethod
    def fs(self) -> fsspec.AbstractFileSystem:
        """The fsspec filesystem of this store's paths."""

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """Return the form of a path that Python code on any machine can open.

        That is a URL with its scheme, or an absolute path for a `LocalStore`. `fs` opens it.
        """

    def full_path(self, listed: str) -> str:
        """Convert a path that `fs` has listed, without a scheme, to the form of `get_full_path`.

        By default, the path is returned unchanged.
        """
        return listed

    def local_path(self, path: str) -> str | None:
        """Return the path by which the operating system opens a file.

        Default: None, which means that only `fs` can open the file.
        """
        return None

    def url(self, path: str) -> str:
        """Return the URL by which other Python packages open a path."""
        local = self.local_path(path)
        # Not percent-encoded: fsspec and Petastorm take the characters literally.
        return path if local is None else f"file://{local}"

    def writable_path(self, path: str) -> str | None:
        """Return the path by which the operating system writes a file in place.

        None if files can be written only as a whole. Default: `local_path`.
        """
        return self.local_path(path)

    @contextlib.contextmanager
    @abstractmethod
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Open a file for writing. The file appears complete when the block ends, or not at all."""

    @property
    def secrets(self) -> frozenset[str]:
        """Secret values of ``storage_options``. Messages must not contain them."""
        return secret_values(self.storage_options)

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists.

        Raises
        ------
        StoreError
            If the storage cannot be queried.
        """
        return self._info(path) is not None

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading. Each returned file has its own position.

        Several threads may call this method. Reads of remote files are requests with retries.

        Raises
        ------
        FileNotFoundError
            If the file does not exist.
        StoreError
            If the file cannot be read.
        """
        if self.local_path(path) is None:
            raw: Any = RemoteFile(self, path)
            return io.BufferedReader(raw, CHUNK_BYTES)
        file: IO[bytes] = self._retried(lambda: self.fs.open(path, "rb"), f"reading {path!r}")
        return file

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises
        ------
        StoreError
            If the file does not exist or cannot be read.
        """
        try:
            return bytes(self._retried(lambda: self.fs.cat_file(path), f"reading {path!r}"))
        except HvdEstimatorsError:
            raise
        except OSError as error:
            if not is_missing(error):
                raise StoreError(
                    f"The store failed at reading {path!r} ({text_of(error)})."
                ) from error
            raise StoreError(f"The store holds no file {path!r} ({text_of(error)}).") from error

    def read_if_exists(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        Raises
        ------
        StoreError
            If the file cannot be read.
        """
        try:
            return self.read(path)
        except StoreError as error:
            if is_missing(error):
                return None
            raise

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        """Read byte ranges of a file, with one request each, several in parallel.

        Parameters
        ----------
        path : str
            The file.
        ranges : sequence of (int, int or None)
            First byte of each range, and the byte after its last byte, or None for the end of the
            file. A negative first byte counts from the end. For example, ``(-8, None)`` is the last
            eight bytes, or the whole file if it is shorter. Ranges are truncated at the end of the
            file.

        Raises
        ------
        FileNotFoundError
            If the file does not exist.
        StoreError
            If the file cannot be read.
        """
        return self._retried(lambda: self._ranges(path, ranges), f"reading {path!r}")

    def _ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
        local = self.local_path(path)
        if local is not None:
            return _local_ranges(local, ranges)
        fs = self.fs
        starts = [start for start, _ in ranges]
        if min(starts, default=0) < 0 and not self._takes_suffixes():
            size = int(fs.size(path))
            starts = [start if start >= 0 else max(size + start, 0) for start in starts]
        stops = [stop for _, stop in ranges]
        if fs.async_impl:
            parts = fs.cat_ranges([path] * len(starts), starts, stops, on_error="raise")
        elif len(starts) == 1:
            parts = [fs.cat_file(path, starts[0], stops[0])]
        else:
            with ThreadPoolExecutor(min(len(starts), _REQUESTS) or 1) as pool:
                parts = list(pool.map(fs.cat_file, [path] * len(starts), starts, stops))
        # Without `stops`, or with a suffix of a file of unknown size, no length is expected.
        for start, stop, part in zip(starts, stops, parts, strict=True):
            if stop is not None and start >= 0 and len(part) < stop - start:
                self._check_length(path, start, stop, len(part))
        return [bytes(part) for part in parts]

    def _check_length(self, path: str, start: int, stop: int, length: int) -> None:
        """Raise an error if a response is shorter than the file's part of a range."""
        size = self._size(path)
        expected = min(stop, size) - start
        if length < expected:
            raise TruncatedResponse(length, expected, start, size)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises
        ------
        FileNotFoundError
            If the file does not exist.
        StoreError
            If the storage cannot be queried.
        """
        return self._retried(lambda: self._size(path), f"looking for {path!r}")

    def _size(self, path: str) -> int:
        self._forget_listings(path)
        return int(self.fs.size(path) or 0)

    def _takes_suffixes(self) -> bool:
        """Return whether a request can read the end of a file of unknown size."""
        return False

    def modified(self, path: str) -> datetime.datetime | None:
        """Return the modification time of a file by the store's clock, in UTC.

        None if the file does not exist, or if the store does not record modification times.
        """

        def ask() -> Any:
            self._forget_listings(path)
            try:
                return self.fs.modified(path)
            except (FileNotFoundError, NotImplementedError):
                return None

        modified = self._retried(ask, f"looking for {path!r}")
        # A time without a time zone is local time, as usual in Python.
        is_time = isinstance(modified, datetime.datetime)
        return modified.astimezone(datetime.UTC) if is_time else None

    def write_text(self, path: str, text: str) -> None:
        """Write a text file. The file appears complete or not at all."""
        with self.open_atomic(path) as file:
            file.write(text.encode())

    def write_new(self, path: str, text: str) -> bool:
        """Write a complete file unless it exists, and return whether it was written.

        Exactly one of several concurrent processes succeeds, however late its request arrives, if
        the storage creates files exclusively: local disks, NFS, HDFS, S3, GCS and Azure do.

        Parameters
        ----------
        path : str
            The file.
        text : str
            Its content, which no other process writes. A file with this content was written by an
            earlier request of this call, whose answer was lost.

        Raises
        ------
        StoreError
            If the file cannot be written.
        """
        content = text.encode()

        def create(is_repeated: bool = False) -> bool:
            try:
                self._create(path, content)
            except Exception as error:
                # Clients raise FileExistsError or an error of their own for an existing file.
                found = self.read_if_exists(path) if kind_of(error) is Kind.OTHER else None
                if found is not None:
                    return found == content
                if is_repeated or not isinstance(error, FileExistsError):
                    raise
                return create(is_repeated=True)  # another process has deleted the file since
            return True

        return self._retried(create, f"writing {path!r}")

    def _create(self, path: str, content: bytes) -> None:
        """Create a file, or raise an error if it exists. Called again after a transient failure.

        The clients of S3, GCS and Azure send a conditional request. Other filesystems of fsspec
        look for the file first, so two of several concurrent processes may succeed.
        """
        self.fs.pipe_file(path, content, mode="create")

    def find(self, path: str) -> list[str]:
        """Return the full paths of all files below a path, sorted; see `list_files`."""
        return [file.path for file in self.list_files(path)]

    def list_files(self, path: str) -> list[ListedFile]:
        """Return all files below a path, sorted by their full paths.

        A file is below itself. The list is empty if the path does not exist.

        Raises
        ------
        StoreError
            If the storage cannot be queried.
        """
        return sorted(self._retried(lambda: self._list_files(path), f"listing {path!r}"))

    def _list_files(self, path: str) -> list[ListedFile]:
        fs = self.fs
        # When fsspec walks a tree, it skips directories that it cannot list by default.
        walks = type(fs).find is fsspec.AbstractFileSystem.find
        options = {"on_error": "raise"} if walks else {}
        self._forget_listings(path)
        try:
            found = fs.find(path, detail=True, **options)
        except (FileNotFoundError, NotADirectoryError):
            if self._info(path) is None:
                return []
            raise
        files = []
        for file, info in found.items():
            # Hadoop's connectors mark directories with empty objects.
            if not file.endswith("/"):
                # A listing has the type of a link, not its target's type.
                regular = info.get("type") != "other" or fs.info(file)["type"] == "file"
                files.append(ListedFile(self.full_path(file), regular))
        return files

    def names(self, path: str) -> list[str]:
        """Return the names of the entries of a directory, sorted.

        The list is empty if the directory does not exist, or if the path is a file.

        Raises
        ------
        StoreError
            If the storage cannot be queried.
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
        """Delete a file or directory if it exists.

        Raises
        ------
        StoreError
            If it cannot be deleted.
        """

        def remove() -> None:
            info = self._info(path)
            # Do not delete files with `rm`, which interprets some characters as patterns.
            with contextlib.suppress(FileNotFoundError):  # another process deleted it meanwhile
                if info is not None and info["type"] == "directory":
                    self.fs.rm(path, recursive=True)
                elif info is not None:
                    self.fs.rm_file(path)

        self._retried(remove, f"deleting {path!r}")

    def move_folder(self, source: str, target: str) -> None:
        """Move a folder to a path that does not exist yet.

        This is one rename if the storage supports renaming folders. On object stores, the files are
        copied in parallel, so other processes may temporarily see only some of them.

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
            elif self._info(source) is not None:  # an earlier attempt may have moved it
                fs.makedirs(posixpath.dirname(self._path_in_fs(target)), exist_ok=True)
                fs.mv(source, target, recursive=True)

        self._retried(move, f"moving {source!r} to {target!r}")
        if not renames:
            self.delete(source)

    def delete_empty(self, path: str) -> None:
        """Delete a directory if it is empty."""
        info = self._info(path)
        if info is not None and info["type"] == "directory" and not self.names(path):
            self._retried(lambda: self.fs.rmdir(path), f"deleting {path!r}")

    def _info(self, path: str) -> dict[str, Any] | None:
        """Return fsspec's information about a file or directory, or None if it does not exist."""

        def ask() -> dict[str, Any] | None:
            self._forget_listings(path)
            try:
                info: dict[str, Any] = self.fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return info

        return self._retried(ask, f"looking for {path!r}")

    def _path_in_fs(self, path: str) -> str:
        """Return a path in the form that `fs` lists; see `full_path`."""
        return path

    def _forget_listings(self, path: str) -> None:
        """Drop cached listings of `fs`, because other processes may have changed the files."""
        self.fs.invalidate_cache(path)

    def _retried(self, action: Callable[[], T], description: str) -> T:
        return with_retries(action, description, self.secrets)


def _local_ranges(path: str, ranges: Sequence[tuple[int, int | None]]) -> list[bytes]:
    """Read byte ranges of a local file; see `Files.read_ranges`."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        parts = []
        for start, stop in ranges:
            first = start if start >= 0 else max(size + start, 0)
            last = size if stop is None else min(stop, size)
            parts.append(_read_fully(file, first, max(last - first, 0)))
        return parts
    finally:
        os.close(file)


def _read_fully(file: int, start: int, size: int) -> bytes:
    """Read some bytes of an open file, less at its end."""
    content = os.pread(file, size, start)
    while len(content) < size and (
        more := os.pread(file, size - len(content), start + len(content))
    ):
        content += more  # a system call returns at most 2 GiB
    return content


class RangeFile(io.RawIOBase):
    """File object that reads each part by its range of bytes; a subclass implements `read_range`.

    Parameters
    ----------
    size : int
        Size of the file.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def read_range(self, start: int, stop: int) -> memoryview | bytes:
        """Return a range of bytes, which is not empty and does not exceed the file."""
        raise NotImplementedError

    def next_range(self, size: int) -> memoryview | bytes:
        """Return the next bytes, less at the end."""
        start, stop = self._position, min(self._position + size, self.size)
        if stop <= start:
            return b""
        self._position = stop
        return self.read_range(start, stop)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes and return their number, which is less at the end."""
        view = memoryview(buffer).cast("B")
        content = self.next_range(len(view))
        view[: len(content)] = content
        return len(content)


class RemoteFile(RangeFile):
    """File of a store that is read by a request for each part.

    Parameters
    ----------
    store : Files
        The store.
    path : str
        The file.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    StoreError
        If the file cannot be read, or if it has become shorter since it was opened.
    """

    def __init__(self, store: Files, path: str) -> None:
        super().__init__(store.size(path))
        self._store = store
        self._path = path

    def read_range(self, start: int, stop: int) -> bytes:
        """Request a range of bytes."""
        (content,) = self._store.read_ranges(self._path, [(start, stop)])
        if len(content) < stop - start:
            raise StoreError(
                f"The store failed at reading {self._path!r}: it has become another file "
                f"meanwhile, of less than {self.size} bytes."
            )
        return content


def digest_of(file: IO[bytes]) -> str:
    """Return the SHA-256 digest of an open file's content, and go to the file's beginning."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    return digest


def copy_from(store: Files, path: str, target: IO[bytes], digest: str | None = None) -> str:
    """Copy a file of the store to a private file and return its digest.

    Parameters
    ----------
    store : Files
        The store.
    path : str
        The file.
    target : file
        Open for writing and reading, at its end. No other process may be able to change it.
    digest : str, optional
        Expected SHA-256 digest of the file.

    Raises
    ------
    StoreError
        If the file does not exist, if its digest differs from ``digest``, or if the disk of the
        private file is full.
    """
    try:
        with store.open(path) as source:
            while chunk := source.read(CHUNK_BYTES):
                with naming_full_disk():
                    target.write(chunk)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"The store holds no file {path!r} ({error}).") from error
    found = digest_of(target)
    if digest is not None and found != digest:
        raise StoreError(
            f"{path!r} holds something else than what was written there. Set a store that all "
            "machines see alike, and that no other program changes."
        )
    return found


def fetch(store: Files, path: str, digest: str | None = None) -> tuple[LocalFile, str]:
    """Return a local copy of a file of the store and its digest; see `copy_from`."""
    local = LocalFile()
    with open(local.path, "w+b") as file:
        copied_digest = copy_from(store, path, file, digest)
    return local, copied_digest
