"""Models in Keras's own files, written and read one variable at a time. Used on both sides.

``Model.save`` holds a whole file in memory before it writes it, and ``load_model`` reads it whole.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import keras
import numpy as np

from hvd_estimators.keras.constructor_configs import constructing
from hvd_estimators.keras.rewritten import (
    read_rewritten,
    rewritten_variables,
    write_rewritten,
)
from hvd_estimators.parquet.columns import Array
from hvd_estimators.store.local_file import CHUNK_BYTES

__all__ = [
    "WEIGHTS",
    "load_folder",
    "load_weights",
    "read_files",
    "save_folder",
    "save_plainly",
    "uncompiled",
    "write_archive",
    "write_files",
]

WEIGHTS = "model.weights.h5"
"""Name of the file of weights; also Keras's name of it within a ``.keras`` file."""

# Keras has had unzipped folders since 3.6 or so only.
_HAS_FOLDERS = "zipped" in inspect.signature(keras.saving.save_model).parameters

# Files above this are mapped into memory instead of read.
_MAPPED_BYTES = 2**20


def uncompiled(model: keras.Model) -> keras.Model:
    """Return a model that is the given one but for what it was compiled with.

    It shares layers and variables with the given one, which other threads may use meanwhile: it is
    for saving, with no state of the optimizer in the file, and for nothing else.
    """
    view: keras.Model = object.__new__(type(model))
    attributes = dict(vars(model))
    if "optimizer" in attributes:
        attributes["optimizer"] = None
    attributes.pop("_compile_config", None)
    attributes["compiled"] = False
    vars(view).update(attributes)
    return view


def save_folder(model: keras.Model, directory: str) -> None:
    """Write what a ``.keras`` file holds as files of a folder that exists."""
    if _HAS_FOLDERS:
        keras.saving.save_model(model, directory, zipped=False)
    else:
        with tempfile.TemporaryDirectory() as beside:
            path = os.path.join(beside, "model.keras")
            keras.saving.save_model(model, path)
            with zipfile.ZipFile(path) as archive:
                archive.extractall(directory)
    for folder, _, _ in os.walk(directory, topdown=False):
        # A ``.keras`` file holds no empty folders, and loading asks whether there are assets.
        if folder != directory and not os.listdir(folder):
            os.rmdir(folder)


def load_folder(directory: str, custom_objects: Mapping[str, Any]) -> keras.Model:
    """Return the model that `save_folder` wrote, not compiled."""
    with constructing(custom_objects) as made:
        given = {"custom_objects": made, "compile": False, "safe_mode": False}
        if _HAS_FOLDERS:
            return keras.saving.load_model(directory, **given)
        with tempfile.TemporaryDirectory() as beside:
            path = os.path.join(beside, "model.keras")
            with zipfile.ZipFile(path, "w") as archive:
                _zip(directory, archive)
            return keras.saving.load_model(path, **given)


def read_files(directory: str) -> dict[str, Array]:
    """Return the files of a folder as bytes, by their paths in it.

    Large ones stay on the disk until they are used, also after the folder has been deleted.
    """
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.getsize(path) > _MAPPED_BYTES:
                # As a plain array, which is pickled without a copy.
                content: Array = np.asarray(np.memmap(path, np.uint8, mode="r"))
            else:
                content = np.fromfile(path, np.uint8)
            found[os.path.relpath(path, directory)] = content
    return found


def write_files(files: dict[str, Array], directory: str) -> None:
    """Write what `read_files` returned to a folder, and empty the dict."""
    while files:
        name, content = files.popitem()
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            content.tofile(file)


def write_archive(
    model: keras.Model, archive: zipfile.ZipFile, rewritten: Mapping[int, Array] | None = None
) -> None:
    """Write a model and its optimizer's state to an archive, which is a ``.keras`` file then.

    Of a model without a config it is ``model.weights.h5`` alone.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    archive : ZipFile
        Open for writing.
    rewritten : mapping, optional
        See `hvd_estimators.keras.rewritten`. Default: what the model has now.
    """
    with tempfile.TemporaryDirectory() as folder:
        _save_plainly(model, folder)
        _zip(folder, archive)
    write_rewritten(rewritten_variables(model) if rewritten is None else rewritten, archive)


def save_plainly(model: keras.Model, directory: str) -> str:
    """Write ``model.keras`` to a folder, or ``model.weights.h5`` of a model without a config.

    Returns
    -------
    str
        The path of the file.
    """
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        if not _save_plainly(model, folder):
            return shutil.move(os.path.join(folder, WEIGHTS), directory)
        path = os.path.join(directory, "model.keras")
        with zipfile.ZipFile(path, "w") as archive:
            _zip(folder, archive)
        return path


def load_weights(model: keras.Model, source: str | IO[bytes]) -> None:
    """Load weights, and the optimizer's state where it is built, as Keras saved them.

    Parameters
    ----------
    model : keras.Model
        Built and compiled.
    source : str or file
        A ``.keras`` or ``.weights.h5`` file, or an archive that holds the latter, whatever its
        name.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(source, "rb")) if isinstance(source, str) else source
        is_archive = file.read(2) == b"PK"
        file.seek(0)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        weights = os.path.join(directory, WEIGHTS)
        if is_archive:
            # Within an archive every seek would read from its beginning.
            archive = stack.enter_context(zipfile.ZipFile(file))
            archive.extract(WEIGHTS, directory)
        else:
            with open(weights, "wb") as copy:
                shutil.copyfileobj(file, copy, CHUNK_BYTES)
        model.load_weights(weights)
        if is_archive:
            read_rewritten(model, archive)


def _save_plainly(model: keras.Model, directory: str) -> bool:
    """Write a model's files to a folder, and return whether these are more than its weights."""
    try:
        save_folder(model, directory)
    except (NotImplementedError, TypeError, ValueError):
        shutil.rmtree(directory)
        os.mkdir(directory)
        model.save_weights(os.path.join(directory, WEIGHTS))
        return False
    return True


def _zip(directory: str, archive: zipfile.ZipFile) -> None:
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            inner = os.path.join(folder, name)
            archive.write(inner, os.path.relpath(inner, directory))
