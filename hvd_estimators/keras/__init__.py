"""Keras 3 on Spark: estimator, model, and Horovod tools for Keras training.

Contains `KerasEstimator`, `KerasModel`, and `load_predictor` for predictions without Spark. Also
contains an averaging optimizer, callbacks and an elastic state for Horovod.

Names are imported on first use, so that a rank can import the trainer without PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.inference.standalone import load_predictor
    from hvd_estimators.keras.callbacks import (
        BestModelCheckpoint,
        BroadcastCallback,
        MetricAverageCallback,
    )
    from hvd_estimators.keras.elastic import KerasState
    from hvd_estimators.keras.estimator import KerasEstimator
    from hvd_estimators.keras.gradients import DistributedOptimizer
    from hvd_estimators.keras.log_callback import LogCallback
    from hvd_estimators.keras.model import KerasModel
    from hvd_estimators.keras.schedules import (
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
    )

__all__ = [
    "BestModelCheckpoint",
    "BroadcastCallback",
    "DistributedOptimizer",
    "KerasEstimator",
    "KerasModel",
    "KerasState",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
    "MetricAverageCallback",
    "load_predictor",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BestModelCheckpoint": "hvd_estimators.keras.callbacks",
        "BroadcastCallback": "hvd_estimators.keras.callbacks",
        "DistributedOptimizer": "hvd_estimators.keras.gradients",
        "KerasEstimator": "hvd_estimators.keras.estimator",
        "KerasModel": "hvd_estimators.keras.model",
        "KerasState": "hvd_estimators.keras.elastic",
        "LearningRateScheduleCallback": "hvd_estimators.keras.schedules",
        "LearningRateWarmupCallback": "hvd_estimators.keras.schedules",
        "LogCallback": "hvd_estimators.keras.log_callback",
        "MetricAverageCallback": "hvd_estimators.keras.callbacks",
        "load_predictor": "hvd_estimators.inference.standalone",
    },
)
