"""What a checkpoint of Keras's holds. Needs neither Horovod nor PySpark."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import h5py
import keras

from hvd_estimators.exceptions import StoreError
from hvd_estimators.keras.files import WEIGHTS
from hvd_estimators.keras.rewritten import read_rewritten
from hvd_estimators.parquet.columns import Array
from hvd_estimators.store.local_file import CHUNK_BYTES

__all__ = ["read_content"]


def read_content(
    file: IO[bytes], safe: bool, custom_objects: Mapping[str, Any]
) -> keras.Model | dict[str, Array]:
    """Return the model, with its optimizer; of a class without a config its weights by name.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from it, such as that of Lambda layers.
    custom_objects : mapping
        Name to custom class or function of the model.

    Raises
    ------
    StoreError
        If the model cannot be made of it.
    """
    with tempfile.TemporaryDirectory() as directory:
        if not zipfile.is_zipfile(file):
            return _weights(file)
        with zipfile.ZipFile(file) as archive:
            if "config.json" not in archive.namelist():
                with open(archive.extract(WEIGHTS, directory), "rb") as weights:
                    return _weights(weights)
        path = os.path.join(directory, "model.keras")
        file.seek(0)
        with open(path, "wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
        try:
            model: keras.Model = keras.saving.load_model(
                path, custom_objects=dict(custom_objects), safe_mode=safe
            )
            with zipfile.ZipFile(path) as archive:
                read_rewritten(model, archive)
            return model
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"Keras cannot make the model of the checkpoint ({error}). Give custom_objects "
                "where it has classes or functions of your own; safe=False runs code that is in "
                "the file, of Lambda layers for example, if you trust who wrote it."
            ) from error


def _weights(file: IO[bytes]) -> dict[str, Array]:
    found: dict[str, Array] = {}

    def take(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset):
            found[name] = entry[()]

    file.seek(0)
    with h5py.File(file, "r") as weights:
        weights.visititems(take)
    return found
