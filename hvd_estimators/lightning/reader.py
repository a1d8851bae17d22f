"""`load_predictor`: predictions of a saved `LightningModel` without Spark."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_estimators.inference.batch import Resources
from hvd_estimators.inference.standalone import predictor_loader
from hvd_estimators.lightning.predictor import LightningPredictor
from hvd_estimators.saving.saved import Saved
from hvd_estimators.torch.predictor import transform_spec

__all__ = ["load_predictor"]


def _load(saved: Saved, resources: Resources) -> tuple[LightningPredictor, Sequence[str]]:
    get = saved.get
    precision = get("inference_precision") or "float32"
    by_step = bool(get("use_predict_step"))
    spec = transform_spec(get)
    return LightningPredictor(saved.file("model"), by_step, spec, precision, resources), ()


load_predictor = predictor_loader(
    "LightningModel",
    _load,
    "It calls the module's ``forward`` or, with ``use_predict_step``, its ``predict_step``. "
    "Row-wise predictions of a `LightningModel` subclass need Spark.",
)
