"""``horovod.spark.common``: modules that the estimators of all frameworks share."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names

__all__: list[str] = []

__getattr__, __dir__ = left_out_names(__name__)
