"""What comes back from a rank: the module as training has left it, or its best weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.lightning.adapter import ModuleAdapter
from hvd_estimators.lightning.flavor import is_lightning

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from hvd_estimators.lightning.outputs import StoreCheckpointIO

__all__ = ["load_best", "users_module"]


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
