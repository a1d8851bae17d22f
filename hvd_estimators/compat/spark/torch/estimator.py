"""``horovod.spark.torch.estimator``: estimator and model of torch."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.common.estimator import HorovodEstimator, HorovodModel
from hvd_estimators.compat.spark.common.params import EstimatorParams
from hvd_estimators.torch.estimator import TorchEstimator as NativeEstimator
from hvd_estimators.torch.model import TorchModel

__all__ = [
    "EstimatorParams",
    "HorovodEstimator",
    "HorovodModel",
    "TorchEstimator",
    "TorchModel",
]


class TorchEstimator(NativeEstimator):
    """Estimator with ``horovod.spark``'s names of metrics: ``group_<number>_<label>``."""

    _upstream_names = True


__getattr__, __dir__ = left_out_names(__name__)
