"""Read saved models and checkpoints without Spark."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import h5py
import keras
import tensorflow as tf

from hvd_estimators.data.arrays import Array
from hvd_estimators.exceptions import StoreError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.inference.standalone import predictor_loader
from hvd_estimators.keras.backend import require_tensorflow
from hvd_estimators.keras.inputs import input_structure, text_columns
from hvd_estimators.keras.losses import pairs_labels
from hvd_estimators.keras.model_file import WEIGHTS, read_rewritten
from hvd_estimators.keras.predictor import KerasPredictor, choose_device
from hvd_estimators.keras.serialization import load_uncompiled
from hvd_estimators.saving.saved import Saved
from hvd_estimators.store.files import CHUNK_BYTES

__all__ = ["load_predictor", "read_content"]


def read_content(
    file: IO[bytes], safe: bool, custom_objects: Mapping[str, Any]
) -> keras.Model | dict[str, Array]:
    """Return the model with its optimizer, or its weights by name if it has no config.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Whether to reject code in the file, such as that of Lambda layers.
    custom_objects : mapping
        Name to custom class or function of the model.

    Raises
    ------
    StoreError
        If the model cannot be created from the file.
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
                f"Keras cannot create the model of the checkpoint ({error}). Set custom_objects if "
                "the model has your own classes or functions. Set safe=False if the file contains "
                "code, such as that of Lambda layers, and you trust its writer."
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


def _load(saved: Saved, resources: Resources) -> tuple[KerasPredictor, Sequence[str]]:
    require_tensorflow()
    get = saved.get
    columns = list(get("feature_columns") or [])
    floatx = get("_floatx") or "float32"
    device = choose_device(resources)
    keras.config.set_floatx(floatx)
    with tf.device(device):
        model, compiled = load_uncompiled(saved.read("model"))
    by_name = get("_input_pairing") == "name"
    structure = input_structure(model, columns, get("_input_keys"), by_name)
    predictor = KerasPredictor(
        model,
        structure,
        columns,
        list(get("label_columns") or []),
        floatx,
        pairs_labels(model, compiled),
        get("outputs"),
        get("inference_precision") or "float32",
        resources,
    )
    return predictor, list(text_columns(structure))


load_predictor = predictor_loader(
    "KerasModel",
    _load,
    "The model is not compiled. Loading sets Keras's float type to that of the training.",
)
