"""``horovod.spark.runner``: what ``horovod.spark`` itself has."""

from __future__ import annotations

from hvd_estimators.launch.elastic.run import run_elastic
from hvd_estimators.launch.runner import run

__all__ = ["run", "run_elastic"]
