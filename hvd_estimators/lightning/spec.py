"""Input of a Lightning rank, and the module that the rank returns."""

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
    """The user's objects for Lightning's Trainer.

    The objects are serialized together, because they may refer to each other. They are pickled even
    if a backend does not pickle, because training changes them.

    Attributes
    ----------
    callbacks : tuple of Callback
        Lightning callbacks.
    logger : Logger, sequence of Logger, bool or None
        The run's loggers.
    profiler : Profiler, str or None
        The run's profiler.
    arguments : mapping
        Further arguments of the Trainer.
    """

    callbacks: tuple[Any, ...]
    logger: Any
    profiler: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class LightningTrainSpec(TrainSpec):
    """Spec of a Lightning rank.

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
        A hint for the error of a step that unpacks the batch as a tuple.
    log_every_n_steps : int
        Steps between two entries of the loggers.
    users_data : UsersDataOptions
        Extra keyword arguments for the user's LightningDataModule.
    """

    flavor: Flavor
    module: LocalFile
    objects: bytes
    form: BatchForm
    batch_hint: str
    log_every_n_steps: int
    users_data: UsersDataOptions


def load_best(trainer: Trainer, module: LightningModule, checkpoints: StoreCheckpointIO) -> None:
    """Load the best weights, if the user's ModelCheckpoint monitors a value."""
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
    """Return the user's module: the one in an adapter, or the LightningModule itself."""
    return module.module if isinstance(module, ModuleAdapter) else module
