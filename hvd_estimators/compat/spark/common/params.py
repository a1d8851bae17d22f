"""``horovod.spark.common.params``: base classes with the params of estimators and models."""

from __future__ import annotations

from hvd_estimators.fitting.hooks import EstimatorHooks as EstimatorParams
from hvd_estimators.model import HorovodModel as ModelParams

__all__ = ["EstimatorParams", "ModelParams"]
