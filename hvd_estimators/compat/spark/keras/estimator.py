"""``horovod.spark.keras.estimator``: estimator and model of Keras 3."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.common.estimator import HorovodEstimator, HorovodModel
from hvd_estimators.compat.spark.common.params import EstimatorParams
from hvd_estimators.keras.estimator import KerasEstimator
from hvd_estimators.keras.model import KerasModel

__all__ = [
    "EstimatorParams",
    "HorovodEstimator",
    "HorovodModel",
    "KerasEstimator",
    "KerasModel",
]

__getattr__, __dir__ = left_out_names(__name__)
