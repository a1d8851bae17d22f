"""``horovod.spark.torch``: the estimator of torch with ``horovod.spark``'s names of metrics."""

from __future__ import annotations

from hvd_estimators.torch.estimator import TorchEstimator as NativeEstimator


class TorchEstimator(NativeEstimator):
    """The estimator, with ``horovod.spark``'s columns and names of metrics.

    A metric is named ``group_<number>_<label>``. Models add no column ``prediction`` by default.
    """

    upstream_names = True
