"""``horovod.spark.common.params``: the bases that declare what estimators and models share."""

from __future__ import annotations

from hvd_estimators.fitting.hooks import EstimatorHooks as EstimatorParams
from hvd_estimators.model import HorovodModel as ModelParams

__all__ = ["EstimatorParams", "ModelParams"]
