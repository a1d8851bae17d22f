"""When a run of Lightning's is saved, and what is added to Lightning's own checkpoint.

Written for either of Lightning's packages: `of_flavor` makes the callback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.lightning.bases import Callback
from hvd_estimators.lightning.callbacks import EpochRecorder
from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.torch.checkpoint import unequal_buffers
from hvd_estimators.torch.shards import BufferState
from hvd_estimators.training.rank import seed_rank
from hvd_estimators.training.shards import ShardStates

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_BUFFERS = "hvd_estimators.buffers"

__all__ = ["RunCheckpoint"]


class RunCheckpoint(Callback):
    """Saves the run when an epoch is over, with all that the next one depends on.

    Lightning's own moment, ``on_train_epoch_end``, comes before schedulers that follow a metric
    have stepped. So an epoch is saved when the next one starts, before any other callback, and the
    last one when training is over.

    Parameters
    ----------
    save : callable
        Takes Lightning's checkpoint, on all ranks, and writes it on rank 0.
    seed : int
        Seed of the run: in each epoch a shard draws random numbers of its own.
    directory : str
        Where the files of the user's ``ModelCheckpoint`` go.
    shards : ShardStates
        The shards that the rank plays.
    """

    def __init__(
        self,
        save: Callable[[dict[str, Any]], None],
        seed: int,
        directory: str,
        shards: ShardStates,
    ) -> None:
        self._shards = shards
        self._seed = seed
        self._directory = directory
        self._save = save
        self._started = False
        self._buffers: Sequence[Mapping[str, torch.Tensor]] = ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Redirect checkpoints, those of the module's ``configure_callbacks`` too."""
        # That hook's callbacks have been added at the end; the recorder is to be the last.
        given: Any = trainer
        given.callbacks = sorted(given.callbacks, key=lambda c: isinstance(c, EpochRecorder))
        for callback in given.callbacks:
            if is_lightning(callback, "callbacks.ModelCheckpoint"):
                callback.dirpath = self._directory

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the buffers of the ranks, which are set once rank 0's have been sent to all."""
        self._buffers = checkpoint.get(_BUFFERS, ())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the rank the buffers back that were its own."""
        own, buffers = BufferState(pl_module), self._buffers
        if len(buffers) == self._shards.num_shards:
            self._shards.for_each(lambda shard: own.restore(buffers[shard]))
        self._buffers = ()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the epoch before, and begin this one's random numbers, as a resumed run does."""
        if self._started:
            self.save(trainer)
        self._started = True
        epoch = trainer.current_epoch
        self._shards.for_each(lambda shard: torch.manual_seed(seed_rank(self._seed, shard, epoch)))

    def save(self, trainer: Trainer) -> None:
        """Save the state after the newest epoch. Called by all ranks."""
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        # The next epoch may be on its way; without this it would be one that was interrupted.
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts["ready"] = counts["completed"]
        module = trainer.lightning_module
        checkpoint[_BUFFERS] = unequal_buffers(module, self._shards)
        self._save(checkpoint)
