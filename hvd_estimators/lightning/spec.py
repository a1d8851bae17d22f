"""What a Lightning rank is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_estimators.lightning.flavor import Flavor
from hvd_estimators.lightning.loaders import BatchForm
from hvd_estimators.lightning.users_data import UsersDataOptions
from hvd_estimators.temporary import LocalFile
from hvd_estimators.training.spec import TrainSpec

__all__ = ["LightningTrainSpec", "TrainerObjects"]


@dataclass(frozen=True)
class TrainerObjects:
    """Objects of the user's for Lightning's Trainer.

    They travel together, since they may refer to each other, and pickled even where a backend does
    not pickle, since training changes them.

    Attributes
    ----------
    callbacks : tuple of Callback
        Lightning callbacks.
    logger : Logger, sequence of Logger, bool or None
        What the run is logged with.
    profiler : Profiler, str or None
        What the run is profiled with.
    arguments : mapping
        Further arguments of the Trainer.
    """

    callbacks: tuple[Any, ...]
    logger: Any
    profiler: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class LightningTrainSpec(TrainSpec):
    """What a Lightning rank is told.

    Attributes
    ----------
    flavor : Flavor
        Lightning's package.
    module : bytes
        The LightningModule, see `module_file`.
    objects : bytes
        A pickled `TrainerObjects`.
    form : BatchForm
        The tensors that a LightningModule gets.
    batch_hint : str
        What to write in a step that takes the batch for a tuple.
    log_every_n_steps : int
        Steps between two entries of the loggers.
    users_data : UsersDataOptions
        What a LightningDataModule of the user's gets, beside what the data modules get.
    """

    flavor: Flavor
    module: LocalFile
    objects: bytes
    form: BatchForm
    batch_hint: str
    log_every_n_steps: int
    users_data: UsersDataOptions
