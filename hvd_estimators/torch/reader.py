"""Reading of saved models and checkpoints, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch

from hvd_estimators.exceptions import StoreError
from hvd_estimators.inference.resources import Resources
from hvd_estimators.inference.standalone import SavedPredictor, on_device, resources_of
from hvd_estimators.saving.saved import read_saved
from hvd_estimators.torch.predictor import TorchPredictor, transform_spec

__all__ = ["load_predictor", "read_content"]


def read_content(file: IO[bytes], safe: bool, custom_objects: Any) -> dict[str, Any]:
    """Return what ``torch.save`` has written, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from it.
    custom_objects : object
        Not used.

    Raises
    ------
    StoreError
        If it holds more than tensors and plain values, and is to run no code.
    """
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=safe)
    except pickle.UnpicklingError as error:
        raise StoreError(
            "The checkpoint holds more than tensors and plain values, and loading these runs code "
            "from the file. If you trust who wrote it, load it with safe=False."
        ) from error
    return content


def load_predictor(
    path: str,
    *,
    batch_size: int | None = None,
    device: str = "cpu",
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedPredictor:
    """Return a saved `TorchModel` as an object that predicts without Spark, in this process.

    >>> predictor = load_predictor("s3://bucket/model")
    >>> predictor.predict({"features": array})["label__output"]

    It predicts as the model's ``transform()`` does: with the same columns, transformation, types,
    classes' columns and precision. PySpark need not be installed. Loading runs code from the files:
    load what you trust.

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
        Threads to compute with, in the whole process. Default: what the framework takes.
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
        If torch does not see the GPU.
    """
    resources = resources_of(device, num_threads, batch_size)
    saved = read_saved(path, "TorchModel", storage_options)
    precision = saved.get("inference_precision") or "float32"

    def load(resources: Resources) -> TorchPredictor:
        return TorchPredictor(saved.file("model"), transform_spec(saved.get), precision, resources)

    shapes = saved.get("output_shapes")
    return SavedPredictor(
        saved,
        on_device(load, device, resources),
        None if shapes is None else [tuple(shape) for shape in shapes],
        batch_size=batch_size,
    )
