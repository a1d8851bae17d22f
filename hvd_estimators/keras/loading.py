"""`load_predictor`: a saved `KerasModel` without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hvd_estimators.inference.resources import Resources
from hvd_estimators.inference.standalone import SavedPredictor, on_device, resources_of
from hvd_estimators.keras.backend import require_tensorflow
from hvd_estimators.keras.inputs import input_structure, text_columns
from hvd_estimators.keras.losses import pairs_labels
from hvd_estimators.keras.placement import place
from hvd_estimators.keras.predictor import KerasPredictor
from hvd_estimators.keras.serialization import load_uncompiled
from hvd_estimators.saving.saved import read_saved

__all__ = ["load_predictor"]


def load_predictor(
    path: str,
    *,
    batch_size: int | None = None,
    device: str = "cpu",
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedPredictor:
    """Return a saved `KerasModel` as an object that predicts without Spark, in this process.

    It predicts as the model's ``transform()`` does, without what the model was compiled with.
    PySpark need not be installed. Loading runs code from the files: load what you trust. It sets
    Keras's float type to that of the training.

    Parameters
    ----------
    path : str
        What ``save()`` was given: a local path, or a URL that a store is registered for, see
        `hvd_estimators.store.Store.create`.
    batch_size : int, optional
        Rows of one forward pass. Default: the model's ``inference_batch_size``, or else 10,000
        rows, or 32 MiB if these are fewer.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    num_threads : int, optional
        Threads to compute with, in the whole process; without effect where TensorFlow has begun.
        Default: what TensorFlow takes.
    storage_options : mapping, optional
        Passed to fsspec's filesystem: keys, tokens, endpoints.

    Returns
    -------
    SavedPredictor
        Its ``predict`` takes NumPy arrays, dicts of them, pandas and Arrow.

    Raises
    ------
    ParamError
        If a parameter is not usable, or another kind of model was saved there.
    StoreError
        If no model was saved there, or it cannot be read.
    GpuError
        If TensorFlow does not see the GPU.
    """
    resources = resources_of(device, num_threads, batch_size)
    require_tensorflow()
    saved = read_saved(path, "KerasModel", storage_options)
    get = saved.get
    columns = list(get("feature_columns") or [])
    floatx = get("_floatx") or "float32"
    text: list[str] = []

    def load(resources: Resources) -> KerasPredictor:
        where = place(resources)
        keras.config.set_floatx(floatx)
        with tf.device(where):
            model, compiled = load_uncompiled(saved.read("model"))
        by_name = get("_input_pairing") == "name"
        structure = input_structure(model, columns, get("_input_keys"), by_name)
        text.extend(text_columns(structure))
        return KerasPredictor(
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

    shapes = get("output_shapes")
    predictor = on_device(load, device, resources)
    return SavedPredictor(
        saved,
        predictor,
        None if shapes is None else [tuple(shape) for shape in shapes],
        text,
        batch_size,
    )
