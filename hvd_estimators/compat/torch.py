"""``horovod.spark.torch``: the estimator of torch with ``horovod.spark``'s names of metrics."""

from __future__ import annotations

from hvd_estimators.torch.estimator import TorchEstimator as NativeEstimator


class TorchEstimator(NativeEstimator):
    """The estimator, with ``horovod.spark``'s names of metrics: ``group_<number>_<label>``."""

    _upstream_names = True
