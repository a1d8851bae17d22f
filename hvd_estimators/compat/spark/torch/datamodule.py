"""``horovod.spark.torch.datamodule``: data module that reads a rank's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_estimators.compat.left_out import left_out_names

if TYPE_CHECKING:
    from hvd_estimators.loading.petastorm import PetastormDataModule

__all__ = ["PetastormDataModule"]

__getattr__, __dir__ = left_out_names(
    __name__, {"PetastormDataModule": "hvd_estimators.loading.petastorm"}
)
