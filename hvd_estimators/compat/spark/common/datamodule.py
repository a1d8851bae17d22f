"""``horovod.spark.common.datamodule``: base class of the data modules, which read rows."""

from __future__ import annotations

from hvd_estimators.loading.readers import DataModule

__all__ = ["DataModule"]
