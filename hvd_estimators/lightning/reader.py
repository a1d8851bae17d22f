"""`load_predictor`: predictions of a saved `LightningModel` without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_estimators.inference.batch import Resources
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

    The object predicts as the model's ``transform()`` does, with the module's ``forward`` or, with
    ``use_predict_step``, its ``predict_step``. PySpark need not be installed. Loading runs code
    from the files, so load only files that you trust. Row-wise predictions of a `LightningModel`
    subclass need Spark.

    Parameters
    ----------
    path : str
        The path given to ``save()``: a local path, or a URL with a registered store, see
        `hvd_estimators.store.Store.create`.
    batch_size : int, optional
        Rows of one forward pass. Default: the model's ``inference_batch_size``. If it is not
        set: 10,000 rows, or fewer so that a batch has at most 32 MiB.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:<number>"``.
    num_threads : int, optional
        Threads for computation, in the whole process. Default: the framework's default.
    storage_options : mapping, optional
        Passed to fsspec's filesystem: keys, tokens, endpoints.

    Returns
    -------
    SavedPredictor
        Its ``predict`` takes NumPy arrays, dicts of arrays, pandas and Arrow.

    Raises
    ------
    ParamError
        If a parameter is not usable, or the path holds another kind of model.
    StoreError
        If the path holds no model, or the model cannot be read.
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

    # fit() stores the output shapes of forward(), which may differ from those of predict_step.
    shapes = None if by_step else get("output_shapes")
    return SavedPredictor(
        saved,
        on_device(load, device, resources),
        None if shapes is None else [tuple(shape) for shape in shapes],
        batch_size=batch_size,
    )
