"""Reading of saved models and checkpoints, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch

from hvd_estimators.exceptions import StoreError
from hvd_estimators.inference.batch import Resources
from hvd_estimators.inference.standalone import SavedPredictor, on_device, resources_of
from hvd_estimators.saving.saved import read_saved
from hvd_estimators.torch.predictor import TorchPredictor, transform_spec

__all__ = ["load_predictor", "read_content"]


def read_content(file: IO[bytes], safe: bool, custom_objects: Any) -> dict[str, Any]:
    """Read a ``torch.save`` file, on the CPU.

    Parameters
    ----------
    file : file
        The checkpoint.
    safe : bool
        Run no code from the file.
    custom_objects : object
        Not used.

    Raises
    ------
    StoreError
        If ``safe`` is set and the file holds more than tensors and plain values.
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
    """Load a saved `TorchModel` for predictions without Spark, in this process.

    >>> predictor = load_predictor("s3://bucket/model")
    >>> predictor.predict({"features": array})["label__output"]

    The predictor works like the model's ``transform()``, with the same columns, transformation,
    types, class columns and precision. PySpark need not be installed. Loading runs code from the
    files, so load only files that you trust.

    Parameters
    ----------
    path : str
        The path that was passed to ``save()``: a local path, or a URL of a registered store, see
        `hvd_estimators.store.Store.create`.
    batch_size : int, optional
        Rows per forward pass. Default: the model's ``inference_batch_size``, or else 10,000 rows,
        or 32 MiB if these are fewer rows.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    num_threads : int, optional
        Threads for computation, in the whole process. Default: the framework's own number.
    storage_options : mapping, optional
        Passed to fsspec's filesystem: keys, tokens, endpoints.

    Returns
    -------
    SavedPredictor
        Its ``predict`` takes NumPy arrays, dicts of arrays, pandas and Arrow.

    Raises
    ------
    ParamError
        If a parameter is invalid, or the path holds another kind of model.
    StoreError
        If the path holds no model, or the model cannot be read.
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
