"""``horovod.spark.keras``: estimator and model."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]

__getattr__, __dir__ = left_out_names(__name__)
