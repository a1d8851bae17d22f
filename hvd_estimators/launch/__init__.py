"""Launch one process per rank, locally or in Spark tasks, and collect the results.

Names are imported on first use, so that a rank does not import PySpark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators._util.lazy_imports import lazy_names

if TYPE_CHECKING:
    from hvd_estimators.launch.api import HorovodRunner, run, run_elastic
    from hvd_estimators.launch.backend import Backend, as_backend
    from hvd_estimators.launch.local_backend import LocalBackend
    from hvd_estimators.launch.service.events import (
        Event,
        RankEpoch,
        RankMessage,
        RankOutput,
        RankProgress,
        log_to_driver,
    )
    from hvd_estimators.launch.spark_backend import SparkBackend

__all__ = [
    "Backend",
    "Event",
    "HorovodRunner",
    "LocalBackend",
    "RankEpoch",
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
        **dict.fromkeys(("HorovodRunner", "run", "run_elastic"), "hvd_estimators.launch.api"),
        **dict.fromkeys(("Backend", "as_backend"), "hvd_estimators.launch.backend"),
        "LocalBackend": "hvd_estimators.launch.local_backend",
        **dict.fromkeys(
            ("Event", "RankEpoch", "RankMessage", "RankOutput", "RankProgress", "log_to_driver"),
            "hvd_estimators.launch.service.events",
        ),
        "SparkBackend": "hvd_estimators.launch.spark_backend",
    },
)
