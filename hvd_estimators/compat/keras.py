"""``horovod.spark.keras``: the estimator of Keras with ``horovod.spark``'s columns."""

from __future__ import annotations

from hvd_estimators.keras.estimator import KerasEstimator as NativeEstimator


class KerasEstimator(NativeEstimator):
    """The estimator, whose models add no column ``prediction`` by default."""

    upstream_names = True
