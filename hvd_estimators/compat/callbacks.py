"""``horovod.tensorflow.keras.callbacks`` for Keras 3, which Horovod's own do not support."""

from __future__ import annotations

from typing import Any

from hvd_estimators.keras import (
    BestModelCheckpoint,
    BroadcastCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvd_estimators.keras import MetricAverageCallback as _MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(BroadcastCallback):
    """Broadcast one rank's weights and optimizer state when training begins.

    Parameters
    ----------
    root_rank : int
        The rank whose state is broadcast.
    device, local_variables
        Accepted for compatibility with Horovod, and ignored.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__(root_rank)


class MetricAverageCallback(_MetricAverageCallback):
    """Merge the metrics of the ranks; see `hvd_estimators.keras.MetricAverageCallback`.

    Parameters
    ----------
    device
        Accepted for compatibility with Horovod, and ignored.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
