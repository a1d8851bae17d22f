"""Local cache of byte ranges of remote files, which all ranks of a machine share."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator

from hvd_estimators.store.base import Store

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 4

_KEPT_SECONDS = 3600
"""Files that were used this long before the process started, or later, stay in a full cache.

Others belong to earlier fits, or to processes that were killed while they wrote.
"""


_SHARE = 64
"""A process looks at the folder again after it has written this part of the maximum size."""


class RangeCache:
    """Folder with a file per byte range. A range that is not there is fetched and written.

    A file gets its name when it is complete, and has a checksum. So nothing reads a part of it.

    Parameters
    ----------
    folder : str
        Parent of the cache's folder, which belongs to this process's user.
    max_bytes : int
        Approximate maximum size of the folder. If it is full, files of earlier fits are deleted.
    store : Store
        The store of the files.
    """

    def __init__(self, folder: str, max_bytes: int, store: Store) -> None:
        self._folder = os.path.join(os.path.expanduser(folder), f"hvd_estimators-{os.getuid()}")
        self._max_bytes = max_bytes
        self._store = store
        self._started = time.time()
        self._modified: dict[str, str] = {}
        self._lock = threading.Lock()
        self._is_usable: bool | None = None
        self._free = 0
        self._is_full = False

    def get(
        self, path: str, checksum: int, start: int, stop: int, fetch: Callable[[int, int], bytes]
    ) -> memoryview | bytes:
        """Return a byte range of a file. Several threads and processes may call this method.

        Parameters
        ----------
        path : str
            The file.
        checksum : int
            Checksum of its footer, which the process has read from the store.
        start, stop : int
            The range.
        fetch : callable
            Fetches the range from the store.
        """
        if not self._can_use():
            return fetch(start, stop)
        if path not in self._modified:
            self._modified[path] = str(self._store.modified(path))
        key = repr((path, checksum, self._modified[path], start, stop))
        entry = os.path.join(self._folder, hashlib.sha256(key.encode()).hexdigest())
        data = _stored(entry)
        if data is not None:
            return data
        fetched = fetch(start, stop)
        with self._lock, self._failures():
            if len(fetched) > self._free and not self._is_full:
                # Other ranks write, too, so only a part of what is free is this rank's.
                share = max(len(fetched), self._max_bytes // _SHARE)
                self._free = min(self._free_for(len(fetched)), share)
                # Counting the files takes long, so a full cache is not counted again.
                self._is_full = len(fetched) > self._free
            if len(fetched) <= self._free:
                self._write(entry, fetched)
                self._free -= len(fetched)
        return fetched

    def _can_use(self) -> bool:
        with self._lock, self._failures():
            if self._is_usable is None:
                self._is_usable = True
                self._make_folder()
        return bool(self._is_usable)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn the cache off with one warning if the block cannot write to its folder."""
        try:
            yield
        except OSError as error:
            if self._is_usable:
                self._is_usable = False
                logger.warning(
                    "local_cache_dir: %s cannot be written (%s), so epochs read from the store. "
                    "Free space there, or set another folder.",
                    self._folder,
                    error,
                )

    def _make_folder(self) -> None:
        """Create the folder, whose files other users must not be able to replace."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        status = os.lstat(self._folder)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError("other users may write to it")

    def _free_for(self, size: int) -> int:
        """Return the bytes that are free; delete files of earlier fits if a size does not fit."""
        total = size
        unused = []
        for file in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                found = file.stat()
                total += found.st_size
                if found.st_mtime < self._started - _KEPT_SECONDS:
                    unused.append((found.st_mtime, found.st_size, file.path))
        for _, freed, path in sorted(unused):
            if total <= self._max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= freed
        return self._max_bytes - total + size

    def _write(self, entry: str, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix="writing-", dir=self._folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(_DIGEST_BYTES, "big"))
            os.replace(temporary, entry)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _stored(entry: str) -> memoryview | None:
    """Return the content of a file of the cache, and note its use; None if it is damaged."""
    try:
        with open(entry, "rb") as file:
            content = memoryview(file.read())
        os.utime(entry)
    except OSError:
        return None
    data, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return data if zlib.crc32(data).to_bytes(_DIGEST_BYTES, "big") == digest else None
