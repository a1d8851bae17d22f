"""``training_epoch_end`` and ``validation_epoch_end``, which Lightning 2 rejects.

Library modules written for ``horovod.spark`` define these hooks and cannot be changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from hvd_estimators.lightning.package import Callback

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["EpochEnds", "has_epoch_ends", "without_epoch_ends"]

_HOOKS = ("training_epoch_end", "validation_epoch_end")


def has_epoch_ends(module: LightningModule) -> bool:
    """Return whether a module has one of the hooks."""
    return any(callable(getattr(module, name, None)) for name in _HOOKS)


@contextlib.contextmanager
def without_epoch_ends(module: LightningModule) -> Iterator[None]:
    """Hide the hooks until the block ends, because the Trainer raises if it finds them."""
    attributes = vars(module)
    own = {name: attributes[name] for name in _HOOKS if name in attributes}
    attributes.update(dict.fromkeys(_HOOKS))
    try:
        yield
    finally:
        for name in _HOOKS:
            del attributes[name]
        attributes.update(own)


class EpochEnds(Callback):
    """Call a module's epoch-end hooks with the epoch's step outputs, as Lightning 1 did.

    ``training_epoch_end`` gets a list with one dict per batch, with the key ``loss``.
    ``validation_epoch_end`` gets the return values of ``validation_step`` that are not None, in one
    list per loader if there are several loaders. Both hooks get only the rank's own batches. In a
    resumed run they get only the batches since the run was resumed.

    Parameters
    ----------
    module : LightningModule
        The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._hooks = {name: getattr(module, name, None) for name in _HOOKS}
        self._trained: list[Any] = []
        self._validated: dict[int, list[Any]] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start an epoch."""
        self._trained = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the output of a training step."""
        if outputs is None or _has_no_rows(trainer):
            return
        if self._hooks["training_epoch_end"] is not None:
            self._trained.append(_detached(outputs))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the module's hook, if it exists."""
        hook = self._hooks["training_epoch_end"]
        if hook is not None:
            hook(self._trained)
        self._trained = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a validation."""
        self._validated = {}

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
        if self._hooks["validation_epoch_end"] is not None:
            of_loader = self._validated.setdefault(dataloader_idx, [])
            if outputs is not None and not _has_no_rows(trainer):
                of_loader.append(_detached(outputs))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the module's hook, if it exists."""
        hook = self._hooks["validation_epoch_end"]
        if hook is not None:
            outputs = [self._validated[index] for index in sorted(self._validated)]
            hook(outputs[0] if len(outputs) == 1 else outputs)
        self._validated = {}


def _has_no_rows(trainer: Trainer) -> bool:
    return bool(getattr(trainer.strategy, "has_no_rows", False))


def _detached(outputs: Any) -> Any:
    return apply_to_collection(outputs, torch.Tensor, torch.Tensor.detach)
