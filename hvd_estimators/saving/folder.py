"""Directories where Spark's own writers put them: a path is what the JVM takes it for.

A relative path, one without a scheme and one of a scheme that only the cluster knows (``dbfs:/``)
are resolved by Hadoop, and files on anything but the local disk are copied by it, with the
credentials that Spark has. Over Spark Connect, where there is no JVM, it is what a store takes it
for: a path of the client's disk, or a URL that fsspec serves. Runs on the driver.
"""

from __future__ import annotations

import abc
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from hvd_estimators._util.spark_session import is_connect
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import LocalStore, Store
from hvd_estimators.store.registry import require_path

__all__ = ["Folder", "open_folder"]

_RENAMING = ("abfs", "abfss", "hdfs", "ofs", "o3fs", "swebhdfs", "viewfs", "webhdfs")
"""Schemes whose files are renamed onto others at once; elsewhere they appear when closed."""


class Folder(abc.ABC):
    """A directory, which may not be there yet. Names are relative to it, with slashes.

    Attributes
    ----------
    url : str
        The directory as Spark is to be given it.
    """

    url: str

    @abc.abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether there is such a file or directory; without a name, this one."""

    @abc.abstractmethod
    def is_file(self) -> bool:
        """Return whether there is a file where the directory should be."""

    @abc.abstractmethod
    def names(self, name: str = "") -> list[str]:
        """Return the names of what is in a directory; nothing where it is not there."""

    @abc.abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file; raises `StoreError` where there is none."""

    @abc.abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a file, with the directories that it is in; it appears whole."""

    @abc.abstractmethod
    def move_file(self, name: str, target: str) -> None:
        """Replace a file by another one: at any moment there is either the old or the new one."""

    @abc.abstractmethod
    def move_directory(self, name: str, target: str) -> None:
        """Rename a directory; there is none of the new name."""

    @abc.abstractmethod
    def delete(self, name: str = "") -> None:
        """Delete a file or directory, if it is there; without a name, the directory itself."""


def open_folder(session: SparkSession, path: str) -> Folder:
    """Return the directory that Spark means by a path.

    Raises
    ------
    ParamError
        If the path is no string, or empty.
    StoreError
        If Spark knows no filesystem for it.
    """
    require_path("path", path)
    if not path:
        raise ParamError(f"path: expected a path or a URL, found {path!r}.")
    if is_connect(session):
        store = Store.create(path)
        local = store.local_path(store.folder)
        if local is not None:
            return _LocalFolder(f"file://{local}", Path(local))
        return _StoreFolder(store)
    jvm: Any = session._jvm
    configuration = session.sparkContext._jsc.hadoopConfiguration()
    with _errors(path):
        given = jvm.org.apache.hadoop.fs.Path(path)
        filesystem = given.getFileSystem(configuration)
        qualified = filesystem.makeQualified(given)
    uri = qualified.toUri()
    if uri.getScheme() == "file":
        return _LocalFolder(qualified.toString(), Path(uri.getPath()))
    return _HadoopFolder(jvm, configuration, filesystem, qualified)


class _LocalFolder(Folder):
    """What a `LocalStore` does; what is more is for Hadoop, which wrote files there, too."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self._root = root
        self._store = LocalStore(str(root))

    def exists(self, name: str = "") -> bool:
        return self._store.exists(str(self._root / name))

    def is_file(self) -> bool:
        return bool(self._store.fs.isfile(str(self._root)))

    def names(self, name: str = "") -> list[str]:
        return self._store.names(str(self._root / name))

    def read(self, name: str) -> bytes:
        try:
            return self._store.read(str(self._root / name))
        except StoreError as error:
            raise StoreError(f"{self.url!r} is not complete: it lacks {name!r}.") from error

    def write(self, name: str, content: bytes) -> None:
        with self._store.open_atomic(str(self._root / name)) as file:
            file.write(content)

    def move_file(self, name: str, target: str) -> None:
        path = self._root / target
        # Hadoop's sum of the old content: without one it reads a file as it is.
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        os.replace(self._root / name, path)

    def move_directory(self, name: str, target: str) -> None:
        os.rename(self._root / name, self._root / target)

    def delete(self, name: str = "") -> None:
        path = self._root / name
        if path.is_symlink():
            path.unlink()
        else:
            self._store.delete(str(path))


class _StoreFolder(Folder):
    """What fsspec reaches, with the credentials of its environment."""

    def __init__(self, store: Store) -> None:
        self.url = store.url(store.folder)
        self._store = store

    def exists(self, name: str = "") -> bool:
        # A directory of an object store is there where something is in it.
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

    def write(self, name: str, content: bytes) -> None:
        with self._store.open_atomic(self._path(name)) as file:
            file.write(content)

    def move_file(self, name: str, target: str) -> None:
        self.write(target, self.read(name))
        self.delete(name)

    def move_directory(self, name: str, target: str) -> None:
        for file in self.names(name):
            self.move_file(f"{name}/{file}", f"{target}/{file}")
        self.delete(name)

    def delete(self, name: str = "") -> None:
        self._store.delete(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._store.folder}/{name}" if name else self._store.folder


class _HadoopFolder(Folder):
    def __init__(self, jvm: Any, configuration: Any, filesystem: Any, root: Any) -> None:
        self.url = root.toString()
        self._fs = jvm.org.apache.hadoop.fs
        self._configuration = configuration
        self._filesystem = filesystem
        self._root = root

    def exists(self, name: str = "") -> bool:
        with _errors(self.url):
            return bool(self._filesystem.exists(self._path(name)))

    def is_file(self) -> bool:
        with _errors(self.url):
            return self.exists() and bool(self._filesystem.getFileStatus(self._root).isFile())

    def names(self, name: str = "") -> list[str]:
        if not self.exists(name):
            return []
        with _errors(self.url):
            entries = self._filesystem.listStatus(self._path(name))
            return sorted(entry.getPath().getName() for entry in entries)

    def read(self, name: str) -> bytes:
        if not self.exists(name):
            raise StoreError(f"{self.url!r} is not complete: it lacks {name!r}.")
        with tempfile.TemporaryDirectory() as folder, _errors(self.url):
            local = os.path.join(folder, "content")
            self._filesystem.copyToLocalFile(False, self._path(name), self._local(local), True)
            return Path(local).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        # By way of a file: what goes through py4j is held by the JVM several times.
        with tempfile.TemporaryDirectory() as folder, _errors(self.url):
            local = os.path.join(folder, "content")
            Path(local).write_bytes(content)
            self._filesystem.copyFromLocalFile(False, True, self._local(local), self._path(name))

    def move_file(self, name: str, target: str) -> None:
        source, destination = self._path(name), self._path(target)
        with _errors(self.url):
            if self._root.toUri().getScheme() in _RENAMING:
                rename = getattr(self._fs, "Options$Rename")
                # Of one option the JVM makes an array, as for any variable number of arguments.
                context = self._fs.FileContext.getFileContext(
                    self._root.toUri(), self._configuration
                )
                context.rename(source, destination, _array(rename, [rename.OVERWRITE]))
                return
            self._fs.FileUtil.copy(
                *(self._filesystem, source, self._filesystem, destination),
                *(True, True, self._configuration),
            )

    def move_directory(self, name: str, target: str) -> None:
        with _errors(self.url):
            if not self._filesystem.rename(self._path(name), self._path(target)):
                raise StoreError(f"{self.url!r}: {name!r} cannot be renamed to {target!r}.")

    def delete(self, name: str = "") -> None:
        with _errors(self.url):
            self._filesystem.delete(self._path(name), True)

    def _path(self, name: str) -> Any:
        return self._fs.Path(self._root, name) if name else self._root

    def _local(self, path: str) -> Any:
        return self._fs.Path(f"file://{path}")


def _array(cls: Any, values: list[Any]) -> Any:
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    array = gateway.new_array(cls, len(values))
    for index, value in enumerate(values):
        array[index] = value
    return array


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turn what the JVM raises into an error that names the path."""
    try:
        yield
    except Py4JJavaError as error:
        raise StoreError(f"{path!r}: {error.java_exception.toString()}") from error
