"""Starts one process per rank, on this machine or in Spark's tasks, and brings back its result.

The names below are imported when they are first used, so that a rank imports no PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.lazy import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.launch.backend import Backend
    from hvd_estimators.launch.elastic.run import run_elastic
    from hvd_estimators.launch.events.messages import log_to_driver
    from hvd_estimators.launch.events.stream import Event, RankMessage, RankOutput, RankProgress
    from hvd_estimators.launch.foreign import as_backend
    from hvd_estimators.launch.horovod_runner import HorovodRunner
    from hvd_estimators.launch.local import LocalBackend
    from hvd_estimators.launch.runner import run
    from hvd_estimators.launch.spark import SparkBackend

__all__ = [
    "Backend",
    "Event",
    "HorovodRunner",
    "LocalBackend",
    "RankMessage",
    "RankOutput",
    "RankProgress",
    "SparkBackend",
    "as_backend",
    "log_to_driver",
    "run",
    "run_elastic",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Backend": "hvd_estimators.launch.backend",
        "Event": "hvd_estimators.launch.events.stream",
        "HorovodRunner": "hvd_estimators.launch.horovod_runner",
        "LocalBackend": "hvd_estimators.launch.local",
        "RankMessage": "hvd_estimators.launch.events.stream",
        "RankOutput": "hvd_estimators.launch.events.stream",
        "RankProgress": "hvd_estimators.launch.events.stream",
        "SparkBackend": "hvd_estimators.launch.spark",
        "as_backend": "hvd_estimators.launch.foreign",
        "log_to_driver": "hvd_estimators.launch.events.messages",
        "run": "hvd_estimators.launch.runner",
        "run_elastic": "hvd_estimators.launch.elastic.run",
    },
)
