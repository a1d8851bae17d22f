"""``horovod.spark.common.datamodule``: the base of what reads the rows for a rank."""

from __future__ import annotations

from hvd_estimators.loading.readers import DataModule

__all__ = ["DataModule"]
