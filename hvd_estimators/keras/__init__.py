"""Keras 3 on Spark: estimator, model, and tools for training loops of your own.

Contains `KerasEstimator`, `KerasModel`, and `load_predictor` for predictions without Spark. Also
contains an averaging optimizer and its callbacks. Horovod's schedules and its elastic state are in
`hvd_estimators.compat`.

Names are imported on first use, so that a rank can import the trainer without PySpark. Without
TensorFlow, Keras runs on torch, unless the environment variable ``KERAS_BACKEND`` is set.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.inference.standalone import load_predictor
    from hvd_estimators.keras.callbacks import (
        BestModelCheckpoint,
        BroadcastCallback,
        MetricAverageCallback,
    )
    from hvd_estimators.keras.estimator import KerasEstimator
    from hvd_estimators.keras.gradients import DistributedOptimizer
    from hvd_estimators.keras.model import KerasModel

__all__ = [
    "BestModelCheckpoint",
    "BroadcastCallback",
    "DistributedOptimizer",
    "KerasEstimator",
    "KerasModel",
    "MetricAverageCallback",
    "load_predictor",
]

if find_spec("tensorflow") is None and find_spec("torch") is not None:
    os.environ.setdefault("KERAS_BACKEND", "torch")

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BestModelCheckpoint": "hvd_estimators.keras.callbacks",
        "BroadcastCallback": "hvd_estimators.keras.callbacks",
        "DistributedOptimizer": "hvd_estimators.keras.gradients",
        "KerasEstimator": "hvd_estimators.keras.estimator",
        "KerasModel": "hvd_estimators.keras.model",
        "MetricAverageCallback": "hvd_estimators.keras.callbacks",
        "load_predictor": "hvd_estimators.inference.standalone",
    },
)
