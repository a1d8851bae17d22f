"""What comes back from a rank: the module as training has left it, or its best weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from hvd_estimators.lightning.adapter import ModuleAdapter
from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.temporary import LocalFile
from hvd_estimators.torch.serialization import dump_module, load_module

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from hvd_estimators.lightning.outputs import StoreCheckpointIO

__all__ = ["load_best", "state_of"]


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


def state_of(module: LightningModule, given: LocalFile) -> dict[str, Any]:
    """Return the module as training has left it; its weights alone where it cannot be pickled."""
    trained: torch.nn.Module = module.module if isinstance(module, ModuleAdapter) else module
    try:
        return {"module": dump_module(trained.cpu())}
    except Exception as error:
        original = load_module(given)
        if isinstance(original, ModuleAdapter):
            original = original.module
        weights = trained.state_dict()
        if weights.keys() != original.state_dict().keys():
            raise
        return {"weights": weights, "lost": _unpicklable(trained) or [f"{error}"]}


def _unpicklable(module: torch.nn.Module) -> list[str]:
    """Return the names of attributes that cannot be pickled."""
    names = []
    inner = vars(torch.nn.Module())
    for prefix, part in module.named_modules():
        # Of a LightningModule, without its Trainer.
        state = part.__getstate__() if hasattr(part, "__getstate__") else vars(part)
        for name, value in dict(state).items():
            if name in inner:
                continue
            try:
                cloudpickle.dumps(value)
            except Exception:
                names.append(f"{prefix}.{name}" if prefix else name)
    return names
