"""``horovod.spark.lightning.estimator``: estimator and model of Lightning 2."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.common.estimator import HorovodEstimator, HorovodModel
from hvd_estimators.compat.spark.common.params import EstimatorParams
from hvd_estimators.lightning.estimator import LightningEstimator as NativeEstimator
from hvd_estimators.lightning.model import TorchModel

__all__ = [
    "MIN_PL_VERSION",
    "EstimatorParams",
    "HorovodEstimator",
    "HorovodModel",
    "TorchEstimator",
    "TorchModel",
]

MIN_PL_VERSION = "2.0.0"


class TorchEstimator(NativeEstimator):
    """Estimator with ``horovod.spark``'s names of metrics: ``group_<number>_<label>``."""

    _upstream_names = True


__getattr__, __dir__ = left_out_names(__name__)
