"""Directories whose paths are resolved as Spark's own writers resolve them.

Hadoop resolves paths that are relative, have no scheme or have a scheme that only the cluster knows
(``dbfs:/``). Hadoop also copies files that are not on the local disk, with Spark's credentials.
Over Spark Connect there is no JVM, and a store resolves the path: a path on the client's disk, or a
URL that fsspec serves. Runs on the driver.
"""

from __future__ import annotations

import abc
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import LocalStore, Store
from hvd_estimators.store.files import CHUNK_BYTES
from hvd_estimators.store.registry import require_path
from hvd_estimators.store.retries import with_retries
from hvd_estimators.store.storage_errors import text_of

T = TypeVar("T")

_RENAMING = ("abfs", "abfss", "hdfs", "ofs", "o3fs", "swebhdfs", "viewfs", "webhdfs")
"""Schemes with an atomic rename onto existing files; elsewhere a file appears when closed."""


class Folder(abc.ABC):
    """A directory, which may not exist yet. Names are relative to it, with slashes.

    Attributes
    ----------
    url : str
        The directory's URL for Spark.
    path : str
        The path or URL by which a store finds the directory.
    """

    url: str
    path: str

    @abc.abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether a file or directory exists; without a name, this directory."""

    @abc.abstractmethod
    def is_file(self) -> bool:
        """Return whether the directory's path is a file."""

    @abc.abstractmethod
    def names(self, name: str = "") -> list[str]:
        """Return the names of a directory's entries; an empty list if it does not exist."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file; raises `StoreError` if it does not exist."""

    @abc.abstractmethod
    def write(self, name: str, content: bytes | LocalFile) -> None:
        """Write or replace a file atomically, and create its parent directories."""

    @abc.abstractmethod
    def delete(self, name: str = "") -> None:
        """Delete a file or directory if it exists; without a name, this directory."""


def open_folder(session: SparkSession, path: str) -> Folder:
    """Return the directory that a path means to Spark.

    Raises
    ------
    ParamError
        If the path is not a string, or is empty.
    StoreError
        If Spark has no filesystem for the path.
    """
    require_path("path", path)
    if not path:
        raise ParamError(f"path: expected a path or a URL, found {path!r}.")
    if is_connect(session):
        store = Store.create(path)
        local = store.local_path(store.folder)
        if local is not None:
            return _LocalFolder(f"file://{local}", local)
        return _StoreFolder(store)
    context: Any = session.sparkContext
    jvm, configuration = context._jvm, context._jsc.hadoopConfiguration()

    def find() -> tuple[Any, Any]:
        given = jvm.org.apache.hadoop.fs.Path(path)
        filesystem = given.getFileSystem(configuration)
        return filesystem, filesystem.makeQualified(given)

    filesystem, qualified = _retried(find, f"looking for {path!r}")
    uri = qualified.toUri()
    if uri.getScheme() == "file":
        return _LocalFolder(qualified.toString(), uri.getPath())
    return _HadoopFolder(jvm, configuration, filesystem, qualified)


class _StoreFolder(Folder):
    """Directory of a store, with the credentials of the environment."""

    def __init__(self, store: Store) -> None:
        self.url = store.url(store.folder)
        self.path = store.folder
        self._store = store

    def exists(self, name: str = "") -> bool:
        # In an object store a directory exists if it contains something.
        return self._store.exists(self._path(name)) or bool(self.names(name))

    def is_file(self) -> bool:
        return bool(self._store.fs.isfile(self._store.folder))

    def names(self, name: str = "") -> list[str]:
        return self._store.names(self._path(name))

    def read(self, name: str) -> bytes:
        try:
            return self._store.read(self._path(name))
        except StoreError as error:
            raise StoreError(f"{self.url!r} is not complete: it lacks {name!r}.") from error

    def write(self, name: str, content: bytes | LocalFile) -> None:
        with self._store.open_atomic(self._path(name)) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                with open(content.path, "rb") as source:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)

    def delete(self, name: str = "") -> None:
        self._store.delete(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._store.folder}/{name}" if name else self._store.folder


class _LocalFolder(_StoreFolder):
    """Local directory, with support for files that Hadoop wrote."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(LocalStore(path))
        self.url = url

    def write(self, name: str, content: bytes | LocalFile) -> None:
        path = Path(self._path(name))
        # Hadoop's checksum of the old content; without a checksum file Hadoop reads a file
        # unchecked.
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        super().write(name, content)

    def delete(self, name: str = "") -> None:
        path = Path(self._path(name))
        if path.is_symlink():
            path.unlink()
        else:
            super().delete(name)


class _HadoopFolder(Folder):
    def __init__(self, jvm: Any, configuration: Any, filesystem: Any, root: Any) -> None:
        self.url = self.path = root.toString()
        self._jvm = jvm
        self._fs = jvm.org.apache.hadoop.fs
        self._configuration = configuration
        self._filesystem = filesystem
        self._root = root

    def exists(self, name: str = "") -> bool:
        return bool(self._call("looking for", name, self._filesystem.exists, self._path(name)))

    def is_file(self) -> bool:
        def ask() -> bool:
            return bool(self._filesystem.getFileStatus(self._root).isFile())

        return self.exists() and self._call("looking for", "", ask)

    def names(self, name: str = "") -> list[str]:
        if not self.exists(name):
            return []
        entries = self._call("listing", name, self._filesystem.listStatus, self._path(name))
        return sorted(entry.getPath().getName() for entry in entries)

    def read(self, name: str) -> bytes:
        if not self.exists(name):
            raise StoreError(f"{self.url!r} is not complete: it lacks {name!r}.")
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, "content")
            paths = self._path(name), self._local(local)
            self._call("reading", name, self._filesystem.copyToLocalFile, False, *paths, True)
            return Path(local).read_bytes()

    def write(self, name: str, content: bytes | LocalFile) -> None:
        target = written = self._path(name)
        is_renamed = self._root.toUri().getScheme() in _RENAMING
        if is_renamed:
            written = self._fs.Path(target.getParent(), f".{uuid.uuid4().hex}.partial")
        # Copy a file, because the JVM holds several copies of content that passes through py4j.
        local = LocalFile() if isinstance(content, bytes) else content
        if isinstance(content, bytes):
            Path(local.path).write_bytes(content)
        paths = self._local(local.path), written
        self._call("writing", name, self._filesystem.copyFromLocalFile, False, True, *paths)
        if is_renamed:
            self._call("writing", name, self._rename, written, target)

    def _rename(self, source: Any, target: Any) -> None:
        overwrite = getattr(self._fs, "Options$Rename").OVERWRITE
        # Java's variable arguments are an array, even for a single option.
        options = self._jvm.java.lang.reflect.Array.newInstance(overwrite.getClass(), 1)
        options[0] = overwrite
        context = self._fs.FileContext.getFileContext(self._root.toUri(), self._configuration)
        context.rename(source, target, options)

    def delete(self, name: str = "") -> None:
        self._call("deleting", name, self._filesystem.delete, self._path(name), True)

    def _call(self, what: str, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of the JVM, with retries; ``what`` and ``name`` are for messages."""
        path = f"{self.url}/{name}" if name else self.url
        return _retried(lambda: function(*arguments), f"{what} {path!r}")

    def _path(self, name: str) -> Any:
        return self._fs.Path(self._root, name) if name else self._root

    def _local(self, path: str) -> Any:
        return self._fs.Path(f"file://{path}")


def _retried(action: Callable[[], T], description: str) -> T:
    """Call a function like `with_retries`; all errors of the JVM become a `StoreError`."""
    try:
        return with_retries(action, description)
    except Py4JJavaError as error:
        raise StoreError(f"The store failed at {description} ({text_of(error)}).") from error
