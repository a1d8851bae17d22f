"""Best model of the user's checkpoint callback, and its copy in the store."""

from __future__ import annotations

import functools
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from hvd_estimators.keras.model_file import WEIGHTS, rewritten_variables, write_rewritten
from hvd_estimators.store import Store
from hvd_estimators.store.files import CHUNK_BYTES


class BestModel:
    """File that the user's checkpoint callback saves its model to. Rank 0 only.

    Parameters
    ----------
    callback : keras.callbacks.ModelCheckpoint
        The user's callback, whose path and saving method are replaced.
    directory : str
        A local directory for the file.
    checkpoints_path : str or None
        The run's checkpoint directory, which receives a copy of the file. None if the run is not
        saved.
    store : Store
        The store that holds ``checkpoints_path``.
    """

    def __init__(
        self,
        callback: keras.callbacks.ModelCheckpoint,
        directory: str,
        checkpoints_path: str | None,
        store: Store,
    ) -> None:
        suffix = ".weights.h5" if callback.save_weights_only else ".keras"
        self._path = os.path.join(directory, f"kept{suffix}")
        callback.filepath = self._path
        name = "on_epoch_end" if callback.save_freq == "epoch" else "on_train_batch_end"
        vars(callback)[name] = self._completing(callback, getattr(callback, name))
        self._store = store
        self._stored_at: str | None = None
        self._written = 0
        if checkpoints_path is not None:
            self._stored_at = f"{checkpoints_path}/kept{suffix}"

    def _completing(
        self, callback: keras.callbacks.ModelCheckpoint, save: Callable[..., None]
    ) -> Callable[..., None]:
        """Return the callback's saving method, extended by the state that Keras's file omits."""
        path = Path(self._path)

        def saved_at() -> int:
            return path.stat().st_mtime_ns if path.exists() else 0

        def save_completely(*args: Any, **kwargs: Any) -> None:
            before = saved_at()
            save(*args, **kwargs)
            if saved_at() == before:
                return
            values = rewritten_variables(callback.model)
            if not values:
                return
            if path.read_bytes()[:2] == b"PK":
                with zipfile.ZipFile(path, "a") as archive:
                    write_rewritten(values, archive)
                return
            with zipfile.ZipFile(f"{path}.partial", "w") as archive:
                archive.write(path, WEIGHTS)
                write_rewritten(values, archive)
            os.replace(f"{path}.partial", path)

        return save_completely

    def fetch(self) -> None:
        """Fetch the file that an earlier part of the run stored."""
        if self._stored_at is not None and self._store.exists(self._stored_at):
            with (
                self._store.open(self._stored_at) as stored,
                open(self._path, "wb") as file,
            ):
                shutil.copyfileobj(stored, file, CHUNK_BYTES)
            self._written = os.stat(self._path).st_mtime_ns

    def upload(self) -> Callable[[], None] | None:
        """Return a function that uploads the current file; None if no upload is needed.

        If the store is on this machine's filesystem, the file is written at once. The previously
        returned function must have finished before this call.
        """
        if self._stored_at is None or not os.path.exists(self._path):
            return None
        written = os.stat(self._path).st_mtime_ns
        if written == self._written:
            return None
        self._written = written
        if self._store.local_path(self._stored_at) is not None:
            _upload(self._path, self._store, self._stored_at)
            return None
        # The callback may replace the file during the upload.
        copy = f"{self._path}.copy"
        shutil.copyfile(self._path, copy)
        return functools.partial(_upload, copy, self._store, self._stored_at)

    def path(self) -> str | None:
        """Return the path of the model file; None if the callback saved no model."""
        return self._path if os.path.exists(self._path) else None


def _upload(path: str, store: Store, target: str) -> None:
    with open(path, "rb") as file, store.open_atomic(target) as stored:
        shutil.copyfileobj(file, stored, CHUNK_BYTES)
