"""``horovod.spark.runner``: the same functions as in ``horovod.spark``."""

from __future__ import annotations

from hvd_estimators.launch.api import run, run_elastic

__all__ = ["run", "run_elastic"]
