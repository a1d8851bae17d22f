"""``horovod.spark``: run the user's functions on ranks."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.compat.spark.runner import run, run_elastic

__all__ = ["run", "run_elastic"]

__getattr__, __dir__ = left_out_names(__name__)
