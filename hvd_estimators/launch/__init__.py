"""Starts one process per rank, on this machine or in Spark's tasks, and brings back its result.

The names below are imported when they are first used, so that a rank imports no PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.lazy import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.launch.backend import Backend
    from hvd_estimators.launch.events import Event, RankOutput, RankProgress
    from hvd_estimators.launch.foreign import as_backend
    from hvd_estimators.launch.local import LocalBackend
    from hvd_estimators.launch.spark import SparkBackend

__all__ = [
    "Backend",
    "Event",
    "LocalBackend",
    "RankOutput",
    "RankProgress",
    "SparkBackend",
    "as_backend",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Backend": "hvd_estimators.launch.backend",
        "Event": "hvd_estimators.launch.events",
        "LocalBackend": "hvd_estimators.launch.local",
        "RankOutput": "hvd_estimators.launch.events",
        "RankProgress": "hvd_estimators.launch.events",
        "SparkBackend": "hvd_estimators.launch.spark",
        "as_backend": "hvd_estimators.launch.foreign",
    },
)
