"""``horovod.spark.common.estimator``: base classes of all estimators and models."""

from __future__ import annotations

from hvd_estimators.compat.spark.common.backend import SparkBackend
from hvd_estimators.compat.spark.common.params import EstimatorParams, ModelParams
from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.model import HorovodModel

__all__ = ["EstimatorParams", "HorovodEstimator", "HorovodModel", "ModelParams", "SparkBackend"]
