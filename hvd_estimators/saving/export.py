"""Destinations of framework exports, which are complete or absent. Imports no PySpark."""

from __future__ import annotations

import contextlib
import importlib
import os
import posixpath
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError, ParamError, StoreError
from hvd_estimators.store import Store
from hvd_estimators.store.registry import require_path


def require_packages(call: str, *packages: str) -> None:
    """Check that the packages for an export to ONNX can be imported.

    Raises
    ------
    DependencyError
        If one of them is not installed; the message begins with ``call``.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise DependencyError(
                f"{call} needs {package}, which is not installed. Run: {INSTALL['onnx']}"
            ) from error


@contextlib.contextmanager
def exported(
    path: str, overwrite: bool, storage_options: Mapping[str, Any] | None, last: str | None = None
) -> Iterator[str]:
    """Yield a local path to write to, and move the result to its destination when the block ends.

    Other files in the same directory are moved next to the destination first.

    Parameters
    ----------
    path : str
        The destination of a file or a folder: a local path, or a URL with a registered store.
    overwrite : bool
        Whether the export may replace an existing file or folder. On the local disk the
        existing one stays complete until then.
    storage_options : mapping or None
        Passed to fsspec's filesystem.
    last : str, optional
        For a folder, the file to upload last, because the folder is not valid without it.

    Raises
    ------
    ParamError
        If the path is not a valid path.
    StoreError
        If the destination exists and ``overwrite`` is False, or it cannot be written.
    """
    require_path("path", path)
    unusable = ParamError(
        f"path: expected where to write to, found {path!r}. Set the path of a file or a folder."
    )
    given = posixpath.basename(path.removeprefix("file:").rstrip("/"))
    if given in ("", ".", "..") or given.endswith(":"):
        raise unusable
    store = Store.create(path, storage_options=dict(storage_options or {}))
    folder, _, name = store.folder.rpartition("/")
    # A home directory has another name than the path, and a bucket is no folder.
    if name != (unquote(given) if path.startswith("file:") else given) or folder.endswith(":/"):
        raise unusable
    target = store.folder
    if store.exists(target) and not overwrite:
        raise StoreError(f"path: {path!r} exists. Set overwrite=True to replace it.")
    on_disk = store.local_path(target)
    if on_disk is not None:
        # In the same directory as the destination, so that a rename is possible.
        os.makedirs(os.path.dirname(on_disk), exist_ok=True)
    beside = None if on_disk is None else os.path.dirname(on_disk)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=beside) as directory:
        made = os.path.join(directory, name)
        yield made
        other_files = [entry for entry in os.listdir(directory) if entry != name]
        for entry in (*other_files, name):
            source, destination = os.path.join(directory, entry), f"{folder}/{entry}"
            if on_disk is not None:
                _rename(source, os.path.join(os.path.dirname(on_disk), entry))
            elif os.path.isdir(source):
                store.delete(destination)
                _upload_folder(store, source, destination, last)
            else:
                _upload(store, source, destination)


def _rename(source: str, target: str) -> None:
    if os.path.isdir(source) and os.path.lexists(target):
        # A rename cannot replace a folder with content, so the old folder is renamed first.
        old = os.path.join(os.path.dirname(source), f"old-{uuid.uuid4().hex}")
        os.rename(target, old)
    elif os.path.isdir(target):
        shutil.rmtree(target)
    os.replace(source, target)


def _upload_folder(store: Store, source: str, target: str, last: str | None) -> None:
    files = [p.relative_to(source).as_posix() for p in Path(source).rglob("*") if p.is_file()]
    for file in sorted(files, key=lambda name: (name == last, name)):
        _upload(store, os.path.join(source, file), f"{target}/{file}")


def _upload(store: Store, source: str, target: str) -> None:
    with open(source, "rb") as file, store.open_atomic(target) as written:
        shutil.copyfileobj(file, written, 2**22)
