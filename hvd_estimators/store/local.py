"""A store on a local (or mounted, shared) filesystem."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlparse

import fsspec

from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.base import Store
from hvd_estimators.store.retries import typed_errors

__all__ = ["LocalStore"]


class LocalStore(Store):
    """Keeps everything under a directory that the driver and all executors see.

    Takes a path or a ``file://`` URL; see `Store` for the parameters.
    """

    creates_exclusively = True

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """Local filesystem of fsspec."""
        return fsspec.filesystem("file", **self.storage_options)

    def get_full_path(self, path: str) -> str:
        """Return an absolute path without a scheme."""
        if path.startswith("file:"):
            path = unquote(urlparse(path).path)
        elif "://" in path:
            raise ParamError(
                f"path: expected one of this machine's, found {path!r}. A store keeps everything "
                "on one filesystem: set a prefix_path on that of the URL."
            )
        return str(Path(path).expanduser().absolute())

    def full_path(self, listed: str) -> str:
        """Return the path as it is."""
        return listed

    def local_path(self, path: str) -> str:
        """Return the path as it is."""
        return path

    def spark_url(self, path: str) -> str:
        """Return a ``file://`` URL, whatever Spark's default filesystem is."""
        # Not percent-encoded: Hadoop takes the characters after the scheme as they are.
        return "file://" + path

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        return os.path.exists(path)

    def delete(self, path: str) -> None:
        """Delete a file or directory; see `Store.delete`."""
        if self.exists(path):
            self._retried(lambda: self.fs.rm(path, recursive=True), f"deleting {path!r}")

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Write to a file beside the target, sync it and rename it when the block ends well."""
        target = Path(path)
        partial = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        try:
            with typed_errors(f"writing {path!r}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(partial, "x+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def write_new(self, path: str, text: str) -> bool:
        """Write a file, whole, if there is none; of several processes one alone succeeds."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        try:
            partial.write_bytes(text.encode())
            os.link(partial, target)
        except FileExistsError:
            return False
        except OSError:
            return self._create(target, text)  # some mounted filesystems have no links
        finally:
            partial.unlink(missing_ok=True)
        return True

    @staticmethod
    def _create(target: Path, text: str) -> bool:
        try:
            with open(target, "xb") as file:
                file.write(text.encode())
        except FileExistsError:
            return False
        return True
