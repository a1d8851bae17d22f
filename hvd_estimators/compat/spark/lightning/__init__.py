"""``horovod.spark.lightning``: estimator and model."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.lightning_1 import restore_names
from hvd_estimators.compat.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

restore_names()
__getattr__, __dir__ = left_out_names(__name__)
