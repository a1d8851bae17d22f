"""Stores on local, mounted and Databricks filesystems."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

import fsspec

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.base import Store
from hvd_estimators.store.files import CHUNK_BYTES, ListedFile
from hvd_estimators.store.registry import dbfs_path, scheme_of
from hvd_estimators.store.retries import typed_errors

_NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of filesystems without hard links, such as FAT and many FUSE mounts."""

_MOST_WALKS = 100
"""Maximum number of walks through a folder that several processes delete."""


class LocalStore(Store):
    """Store in a directory that the driver and all executors share.

    Accepts a path or a ``file://`` URL; see `Store` for the parameters.
    """

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """Local filesystem of fsspec."""
        return fsspec.filesystem("file", **self.storage_options)

    def get_full_path(self, path: str) -> str:
        """Return an absolute path without a scheme."""
        if path.startswith("file:"):
            # Not parsed as a URL, because "#" and "?" are part of a file's name.
            path = unquote(re.sub("^file:(//[^/]*)?", "", path))
        elif scheme_of(path):
            raise ParamError(
                f"path: expected one of this machine's, found {path!r}. A store keeps everything "
                "on one filesystem: set a prefix_path on the URL's filesystem."
            )
        return str(Path(path).expanduser().absolute())

    def local_path(self, path: str) -> str:
        """Return the path unchanged."""
        return path

    def spark_url(self, path: str) -> str:
        """Return a ``file://`` URL, independent of Spark's default filesystem."""
        # Not percent-encoded: Hadoop takes the characters after the scheme literally.
        return "file://" + path

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""

        def stat_path() -> bool:
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

        return self._retried(stat_path, f"looking for {path!r}")

    def _list_files(self, path: str) -> list[ListedFile]:
        # Walks the tree itself: fsspec asks for the status of each file, which takes much longer.
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        if not stat.S_ISDIR(found.st_mode):
            return [ListedFile(path, stat.S_ISREG(found.st_mode))]
        files, folders = [], [path]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        # Reading a link to a missing file raises an error that names it.
                        is_lost = entry.is_symlink() and not os.path.exists(entry.path)
                        files.append(ListedFile(entry.path, is_lost or entry.is_file()))
        return files

    def delete(self, path: str) -> None:
        """Delete a file or directory; see `Store.delete`."""

        def remove() -> None:
            # If another process deletes parts of the folder meanwhile, the walk through it fails.
            for _ in range(_MOST_WALKS):
                if not self.exists(path):
                    return
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm(path, recursive=True)
            self.fs.rm(path, recursive=True)

        self._retried(remove, f"deleting {path!r}")

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Write to a file next to the target, then sync and rename it if the block succeeds."""
        with typed_errors(f"writing {path!r}"), _partial(path) as partial:
            with open(partial, "x+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)

    def _create(self, path: str, content: bytes) -> None:
        with _partial(path) as partial:
            partial.write_bytes(content)
            try:
                os.link(partial, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # Readers may see the file before it has its content.
                with open(path, "xb") as file:
                    try:
                        file.write(content)
                        file.flush()
                    except OSError:
                        os.unlink(path)
                        raise


@contextlib.contextmanager
def _partial(path: str) -> Iterator[Path]:
    """Yield the path of a file next to the target, and delete what the block leaves there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


MOUNT = "/dbfs"
"""Mount point of DBFS on Databricks."""


class _MountedStore(LocalStore):
    """Folder on a FUSE mount that supports only sequential writes of whole files."""

    def spark_url(self, path: str) -> str:
        """Return the first of `spark_urls`."""
        return self.spark_urls(path)[0]

    def writable_path(self, path: str) -> str | None:
        """Return None, because files cannot be appended to."""
        return None

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Write to a local file, copy it next to the target, and rename the copy."""
        with typed_errors(f"writing {path!r}"), tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with _partial(path) as partial:
                with open(partial, "wb") as copy:
                    shutil.copyfileobj(file, copy, CHUNK_BYTES)
                os.replace(partial, path)


class DBFSLocalStore(_MountedStore):
    """Store on DBFS through ``/dbfs``, its mount point on all Databricks machines.

    On Databricks, `Store.create` uses this class for DBFS prefixes.

    Parameters
    ----------
    prefix_path : str, optional
        ``dbfs:/path``, ``/dbfs/path``, ``file:/dbfs/path`` or ``file:///dbfs/path``.
    mount : str
        Mount point of DBFS.
    train_path, val_path, test_path, runs_path, save_runs, storage_options, checkpoint_filename
        See `Store`.

    Raises
    ------
    ParamError
        If a path does not have one of these forms.
    """

    def __init__(
        self, prefix_path: str | None = None, *args: Any, mount: str = MOUNT, **kwargs: Any
    ) -> None:
        self._mount = os.path.abspath(mount)
        super().__init__(prefix_path, *args, **kwargs)

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Return whether a path is on DBFS, in any of its forms."""
        return dbfs_path(path) is not None

    def get_full_path(self, path: str) -> str:
        """Return the path below the mount point."""
        if path.startswith(f"{self._mount}/"):
            return super().get_full_path(path)
        path_in_dbfs = dbfs_path(path)
        if path_in_dbfs is None:
            raise ParamError(
                f"expected a path on DBFS, found {path!r}. Set dbfs:/path or /dbfs/path."
            )
        return super().get_full_path(self._mount + path_in_dbfs)

    def spark_urls(self, path: str) -> Sequence[str]:
        """Return ``dbfs:/path``, and a ``file:`` URL for Sparks that do not know ``dbfs:``."""
        return (f"dbfs:{path.removeprefix(self._mount) or '/'}", f"file://{path}")


class VolumesStore(_MountedStore):
    """Store in a Unity Catalog volume, as ``/Volumes/catalog/schema/volume/path``.

    Spark's form of the path begins with ``dbfs:``.
    """

    def get_full_path(self, path: str) -> str:
        """Return the path on the mount."""
        is_of_spark = path.startswith("dbfs:/Volumes/")
        return super().get_full_path(path.removeprefix("dbfs:") if is_of_spark else path)

    def spark_urls(self, path: str) -> Sequence[str]:
        """Return ``dbfs:/Volumes/…``, and a ``file:`` URL for Sparks that do not know ``dbfs:``."""
        return (f"dbfs:{path}", f"file://{path}")
