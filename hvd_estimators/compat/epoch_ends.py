"""Hooks of Lightning 1 at the end of epochs. Runs on the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from hvd_estimators.lightning.package import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

EPOCH_END_HOOKS = ("training_epoch_end", "validation_epoch_end")
"""Library modules written for ``horovod.spark`` define them and cannot be changed."""


class EpochEnds(Callback):
    """Call a module's epoch-end hooks with the epoch's step outputs, as Lightning 1 did.

    ``training_epoch_end`` gets a list with one dict per batch, with the key ``loss``.
    ``validation_epoch_end`` gets the return values of ``validation_step`` that are not None, in one
    list per loader if there are several loaders. Both hooks get only the rank's own batches. In a
    resumed run they get only the batches since the run was resumed.
    """

    def __init__(self) -> None:
        self._trained: list[Any] = []
        self._validated: dict[int, list[Any]] = {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Show the module's hooks again, which were hidden from the Trainer."""
        for name in EPOCH_END_HOOKS:
            vars(pl_module).pop(name, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the outputs of a training step."""
        strategy: Any = trainer.strategy
        self._trained += [_detached(output) for output, rows in strategy.outputs if rows]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the module's hook, if it exists."""
        outputs, self._trained = self._trained, []
        _call("training_epoch_end", pl_module, outputs)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Store the output of a validation step."""
        of_loader = self._validated.setdefault(dataloader_idx, [])
        if outputs is not None:
            of_loader.append(_detached(outputs))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the module's hook, if it exists."""
        outputs = [self._validated[index] for index in sorted(self._validated)]
        self._validated = {}
        _call("validation_epoch_end", pl_module, outputs[0] if len(outputs) == 1 else outputs)


def _call(name: str, module: LightningModule, outputs: Any) -> None:
    hook = getattr(type(module), name, None)
    if hook is not None:
        hook(module, outputs)


def _detached(outputs: Any) -> Any:
    return apply_to_collection(outputs, torch.Tensor, torch.Tensor.detach)
