"""Local directory that is synchronized with a directory of the store.

TensorBoard, CSV loggers, MLflow's file store and profilers can write only local files. If the store
is not a local directory, they write into a temporary directory, and its files are uploaded to the
store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import posixpath
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.store.base import Store
from hvd_estimators.store.paths import is_partial

logger = logging.getLogger(__name__)

SYNC_SECONDS = 30.0
"""Interval of uploads within an epoch."""

_SHARE = 0.1

_FILES_WITH_PATHS = ("meta.yaml",)
"""Files in which MLflow's file store records the location of a run's artifacts."""


class SyncedDirectory:
    """A run's directory for libraries that write local files. Runs on a rank or on the driver.

    Use it as a context manager. For a store on the local filesystem, it is the store's own
    directory. Otherwise, it uploads new and changed files, each as a whole file. Uploads happen on
    `sync`, every `SYNC_SECONDS`, and when the block ends, including by an error.

    A background thread uploads while training runs. If uploads are slow, the interval grows so that
    they take at most a tenth of the time. Files that failed to upload are retried with the next
    upload. Several ranks may share the directory if their files have different names.

    Parameters
    ----------
    store : Store
        The destination of the files.
    path : str or None
        The store's directory. If None, there is no directory, and the attribute `path` is None.
    fetch : bool
        Download the existing files first, as a resumed run must. Otherwise files that are appended
        to would lose their earlier content.

    Attributes
    ----------
    path : str or None
        The local directory, within the block.
    """

    def __init__(self, store: Store, path: str | None, fetch: bool = True) -> None:
        self._store = store
        self._target = path
        self._fetch = fetch
        self._known: dict[str, tuple[int, int]] = {}
        self._uploader: concurrent.futures.ThreadPoolExecutor | None = None
        self._upload: concurrent.futures.Future[bool] | None = None
        self._took = 0.0
        self._ended = threading.Event()
        self.path: str | None = None

    def __enter__(self) -> Self:
        if self._target is None:
            return self
        self.path = self._store.writable_path(self._target)
        if self.path is not None:
            return self
        self.path = tempfile.mkdtemp(prefix=folder_prefix())
        try:
            if self._fetch:
                self._download(self._target)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._uploader = concurrent.futures.ThreadPoolExecutor(1, "hvd_estimators run directory")
        threading.Thread(
            target=self._sync_now_and_then, name="hvd_estimators run directory timer", daemon=True
        ).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._uploader is None or self.path is None:
            return
        self._ended.set()
        self._uploader.shutdown(wait=True)
        if self._upload_changes(""):
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            logger.warning(
                "They stay in %r on %s; delete them when you have read them.",
                *(self.path, socket.gethostname()),
            )

    def sync(self) -> None:
        """Upload new and changed files in the background.

        Files that are deleted here stay in the store: a host may clean its temporary folders.

        If an upload is already running, the call does nothing. Later changes are part of the next
        upload.
        """
        if self._uploader is not None and (self._upload is None or self._upload.done()):
            with contextlib.suppress(RuntimeError):  # the block has just ended
                self._upload = self._uploader.submit(self._upload_changes)

    def _sync_now_and_then(self) -> None:
        while not self._ended.wait(max(SYNC_SECONDS, self._took / _SHARE)):
            self.sync()

    def _download(self, target: str) -> None:
        for file in self._store.find(target):
            name = file.removeprefix(target).lstrip("/")
            if is_partial(posixpath.basename(name)):
                # Only one fit at a time writes a run, so no process is writing this file.
                self._store.delete(file)
                continue
            local = self._local(name)
            local.parent.mkdir(parents=True, exist_ok=True)
            with self._store.open(file) as source, open(local, "wb") as copy:
                if local.name in _FILES_WITH_PATHS:
                    copy.write(self._localized(source.read()))
                else:
                    shutil.copyfileobj(source, copy)
        self._known = self._files()

    def _upload_changes(self, next_time: str = " They are sent again soon.") -> bool:
        """Upload new and changed files, and return whether all uploads succeeded."""
        began = time.monotonic()
        try:
            files = self._files()
            for name, state in files.items():
                if self._known.get(name) == state:
                    continue
                # If the file grows during the upload, the next upload sends it again.
                with (
                    open(self._local(name), "rb") as source,
                    self._store.open_atomic(f"{self._target}/{name}") as copy,
                ):
                    if Path(name).name in _FILES_WITH_PATHS:
                        copy.write(self._published(source.read()))
                    else:
                        shutil.copyfileobj(source, copy)
                self._known[name] = state
        except Exception as error:
            # A failed upload of logs must not stop the training.
            logger.warning(
                "Files of the run could not be written to %s (%s: %s).%s",
                self._target,
                type(error).__name__,
                error,
                next_time,
            )
            return False
        finally:
            self._took = time.monotonic() - began
        return True

    def _published(self, content: bytes) -> bytes:
        """Replace the local path by the store's path in the content of a file."""
        local, target = str(self.path).encode(), str(self._target).encode()
        for written in (b"file://" + local, b"file:" + local, local):
            content = content.replace(written, target)
        return content

    def _localized(self, content: bytes) -> bytes:
        """Replace the store's path by the local path in the content of a file."""
        return content.replace(str(self._target).encode(), f"file:{self.path}".encode())

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the size and modification time of each file, by relative path."""
        files = {}
        for folder, _, names in os.walk(self._local("")):
            for name in names:
                path = Path(folder, name)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # a temporary file, deleted in the meantime
                relative = path.relative_to(self._local("")).as_posix()
                files[relative] = (status.st_size, status.st_mtime_ns)
        return files

    def _local(self, name: str) -> Path:
        assert self.path is not None
        return Path(self.path, name)
