"""``horovod.spark.lightning.datamodule``, whose names are all left out."""

from __future__ import annotations

from hvd_estimators.compat.left_out import left_out_names

__all__: list[str] = []

__getattr__, __dir__ = left_out_names(__name__)
