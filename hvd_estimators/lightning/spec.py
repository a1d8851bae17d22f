"""What a Lightning rank receives, and the module that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.lightning.adapter import ModuleAdapter
from hvd_estimators.lightning.loaders import BatchForm, UsersDataOptions
from hvd_estimators.lightning.package import Flavor, is_lightning
from hvd_estimators.training.spec import TrainSpec

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from hvd_estimators.lightning.loggers import StoreCheckpointIO

__all__ = ["LightningTrainSpec", "TrainerObjects", "load_best", "users_module"]


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


def load_best(trainer: Trainer, module: LightningModule, checkpoints: StoreCheckpointIO) -> None:
    """Load the best weights, where a ModelCheckpoint of the user's says what is best."""
    connected: Any = trainer
    for callback in connected.callbacks:
        if (
            is_lightning(callback, "callbacks.ModelCheckpoint")
            and callback.monitor is not None
            and callback.best_model_path
        ):
            checkpoint = checkpoints.load_checkpoint(callback.best_model_path)
            module.load_state_dict(checkpoint["state_dict"])
            return


def users_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that the user gave: that of an adapter, or the LightningModule."""
    return module.module if isinstance(module, ModuleAdapter) else module
