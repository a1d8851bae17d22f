"""A local directory for what can only write local files, kept the same as one of the store.

TensorBoard, loggers that write CSV, MLflow's file store and profilers know no stores. Where a
store is no local directory, they write into one that is temporary, whose files go to the store.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.store.base import Store

__all__ = ["SyncedDirectory"]

logger = logging.getLogger(__name__)

SYNC_SECONDS = 30.0
"""How often files go to the store within an epoch."""

_SHARE = 0.1

_TELLING_THEIR_PLACE = ("meta.yaml",)
"""What MLflow's file store writes the place of a run's artifacts into."""


class SyncedDirectory:
    """A directory of a run, for libraries that write local files. Runs on a rank.

    Used as a context manager. For a store on this machine's filesystem it is the store's directory
    itself. Otherwise new and changed files go to the store, as a whole, whenever `sync` asks for
    it, every `SYNC_SECONDS` besides, and when the block ends, also by an error. This is done beside
    training; where files are so large that it takes long, the times between grow, so that a tenth
    of the time is spent on it. What could not be sent is sent with what comes next. Several ranks
    may have the same directory, if their files have different names.

    Parameters
    ----------
    store : Store
        Where the files go.
    path : str or None
        The store's directory; None: there is none, and `path` is None.
    fetch : bool
        Begin with what is in the store, as a run does that is gone on with: files that are
        appended to would lose their beginning otherwise.

    Attributes
    ----------
    path : str or None
        The local directory, while the block lasts.
    """

    def __init__(self, store: Store, path: str | None, fetch: bool = True) -> None:
        self._store = store
        self._target = path
        self._fetch = fetch
        self._is_copy = False
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
        self._is_copy = True
        self.path = tempfile.mkdtemp(prefix="hvd_estimators-")
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

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._uploader is None or self.path is None:
            return
        self._ended.set()
        is_complete = False
        try:
            self._uploader.shutdown(wait=True)
            is_complete = self._upload_changes("")
            if not is_complete:
                logger.warning(
                    "They stay in %r on %s until somebody deletes them.",
                    self.path,
                    socket.gethostname(),
                )
        finally:
            if is_complete:
                shutil.rmtree(self.path, ignore_errors=True)

    def sync(self) -> None:
        """Send new and changed files to the store, in a thread; what has gone is deleted there.

        One that is still on its way is enough: what comes later goes with the next one.
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
            local = self._local(name)
            local.parent.mkdir(parents=True, exist_ok=True)
            with self._store.open(file) as source, open(local, "wb") as copy:
                if local.name in _TELLING_THEIR_PLACE:
                    copy.write(self._localized(source.read()))
                else:
                    shutil.copyfileobj(source, copy)
        self._known = self._files()

    def _upload_changes(self, next_time: str = " They are sent again soon.") -> bool:
        """Send what is new, and return whether all of it was."""
        began = time.monotonic()
        try:
            found = self._files()
            for name in self._known.keys() - found.keys():
                self._store.delete(f"{self._target}/{name}")
                del self._known[name]
            for name, state in found.items():
                if self._known.get(name) == state:
                    continue
                # It may grow meanwhile; it is sent once more then.
                with (
                    open(self._local(name), "rb") as source,
                    self._store.open_atomic(f"{self._target}/{name}") as copy,
                ):
                    if Path(name).name in _TELLING_THEIR_PLACE:
                        copy.write(self._published(source.read()))
                    else:
                        shutil.copyfileobj(source, copy)
                self._known[name] = state
        except Exception as error:
            # Logs are not worth a training run.
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
        """Return a file that tells where it lies, with its place in the store."""
        local, target = str(self.path).encode(), str(self._target).encode()
        for written in (b"file://" + local, b"file:" + local, local):
            content = content.replace(written, target)
        return content

    def _localized(self, content: bytes) -> bytes:
        """Return a file that tells where it lies, with its place on this machine."""
        return content.replace(str(self._target).encode(), f"file:{self.path}".encode())

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return the size and the time of change of each file, by its name."""
        files = {}
        for folder, _, names in os.walk(self._local("")):
            for name in names:
                path = Path(folder, name)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # temporary, and gone since
                relative = path.relative_to(self._local("")).as_posix()
                files[relative] = (status.st_size, status.st_mtime_ns)
        return files

    def _local(self, name: str) -> Path:
        assert self.path is not None
        return Path(self.path, name)
