"""``horovod.spark.task.task_info``: the same name as in ``horovod.spark.task``."""

from __future__ import annotations

from hvd_estimators.launch.gpus import get_available_devices

__all__ = ["get_available_devices"]
