"""`load_predictor`: a saved `LightningModel` without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_estimators.inference.resources import Resources
from hvd_estimators.inference.standalone import SavedPredictor, on_device, resources_of
from hvd_estimators.lightning.predictor import LightningPredictor
from hvd_estimators.saving.saved import read_saved
from hvd_estimators.torch.predictor import transform_spec

__all__ = ["load_predictor"]


def load_predictor(
    path: str,
    *,
    batch_size: int | None = None,
    device: str = "cpu",
    num_threads: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SavedPredictor:
    """Return a saved `LightningModel` as an object that predicts without Spark, in this process.

    It predicts as the model's ``transform()`` does, by the module's ``forward`` or, with
    ``use_predict_step``, by its ``predict_step``. PySpark need not be installed. Loading runs code
    from the files: load what you trust. Predictions of a subclass by rows need Spark.

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
    saved = read_saved(path, "LightningModel", storage_options)
    get = saved.get
    by_step = bool(get("use_predict_step"))

    def load(resources: Resources) -> LightningPredictor:
        return LightningPredictor(
            saved.file("model"),
            by_step,
            transform_spec(get),
            get("inference_precision") or "float32",
            resources,
        )

    # What fit() found out are the shapes of what forward() returns.
    shapes = None if by_step else get("output_shapes")
    return SavedPredictor(
        saved,
        on_device(load, device, resources),
        None if shapes is None else [tuple(shape) for shape in shapes],
        batch_size=batch_size,
    )
