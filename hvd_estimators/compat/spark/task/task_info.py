"""``horovod.spark.task.task_info``: what ``horovod.spark.task`` itself has."""

from __future__ import annotations

from hvd_estimators.launch.gpus import get_available_devices

__all__ = ["get_available_devices"]
