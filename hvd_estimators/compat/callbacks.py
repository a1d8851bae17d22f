"""``horovod.tensorflow.keras.callbacks`` for Keras 3, which Horovod's own do not support.

`LogCallback` is the one of Databricks' ``sparkdl``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import keras

from hvd_estimators.compat.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras import BestModelCheckpoint, BroadcastCallback
from hvd_estimators.keras import MetricAverageCallback as _MetricAverageCallback
from hvd_estimators.launch.service.events import log_to_driver

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(BroadcastCallback):
    """Broadcast one rank's weights and optimizer state when training begins.

    Parameters
    ----------
    root_rank : int
        The rank whose state is broadcast.
    device
        Accepted for compatibility with Horovod, and ignored.
    local_variables
        Must be empty: no variables are left out.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        if local_variables:
            raise ParamError(
                "local_variables: found some, and all variables are broadcast. Leave it out, and "
                "set variables of a single rank after training begins."
            )
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


class LogCallback(keras.callbacks.Callback):
    """Report the start and end of every epoch to the driver's standard output.

    Replaces ``sparkdl.horovod.tensorflow.keras.LogCallback``. Only rank 0 sends its lines, so all
    ranks may have the callback. If it follows `MetricAverageCallback`, the logs cover the rows of
    all ranks.

    Parameters
    ----------
    per_batch_log : bool
        Whether to report every batch as well.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._per_batch_log = per_batch_log
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the start of an epoch."""
        self._epoch = epoch
        self._report(f"epoch {epoch} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the logs of a batch if ``per_batch_log`` is set."""
        if self._per_batch_log:
            self._report(f"epoch {self._epoch}, batch {batch}: {_numbers(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the logs of an epoch."""
        self._report(f"epoch {epoch} ends: {_numbers(logs)}")

    def _report(self, text: str) -> None:
        # Not current(): programs without other ranks need no collectives.
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            log_to_driver(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _numbers(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={_plain_text(value)}" for name, value in (logs or {}).items())


def _plain_text(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError):
        return str(value)
