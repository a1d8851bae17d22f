"""``horovod.spark.task``: information about a rank's task."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.launch.gpus import get_available_devices

__all__ = ["get_available_devices"]

__getattr__, __dir__ = left_out_names(__name__)
