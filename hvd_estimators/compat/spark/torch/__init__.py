"""``horovod.spark.torch``: estimator and model."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

__getattr__, __dir__ = left_out_names(__name__)
