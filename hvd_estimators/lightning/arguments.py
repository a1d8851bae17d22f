"""What the ranks' Trainer is made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.lightning.exact import ExactStrategy
from hvd_estimators.lightning.flavor import is_lightning
from hvd_estimators.lightning.outputs import make_loggers, make_profiler
from hvd_estimators.lightning.spec import LightningTrainSpec, TrainerObjects
from hvd_estimators.lightning.users_data import is_lightning_data

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["trainer_arguments"]


def trainer_arguments(
    spec: LightningTrainSpec,
    objects: TrainerObjects,
    module: LightningModule,
    device: torch.device,
    strategy: ExactStrategy,
    callbacks: Sequence[Any],
    logs_path: str | None,
    rank: int,
    steps: int | None = None,
) -> dict[str, Any]:
    """Return the Trainer's arguments, which those of the user's replace.

    Parameters
    ----------
    spec : LightningTrainSpec
        What the rank was told.
    objects : TrainerObjects
        The user's.
    module : LightningModule
        What is trained.
    device : torch.device
        What the rank trains on.
    strategy : ExactStrategy
        Connects the ranks.
    callbacks : sequence of Callback
        The user's, and others.
    logs_path : str or None
        A local directory for the run's logs.
    rank : int
        This rank.
    steps : int, optional
        Steps that a resumed run has logged.
    """
    passes = 1
    if module.automatic_optimization:
        passes = spec.backward_passes_per_step * spec.data.passes_per_batch
    given = {
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1,
        "strategy": strategy,
        "max_epochs": spec.epochs,
        "callbacks": list(callbacks),
        "logger": make_loggers(objects.logger, logs_path, rank, spec.flavor, steps),
        "log_every_n_steps": spec.log_every_n_steps,
        "profiler": make_profiler(objects.profiler, logs_path, spec.flavor),
        "accumulate_grad_batches": passes,
        "enable_checkpointing": any(is_lightning(c, "callbacks.Checkpoint") for c in callbacks),
        # Lightning rejects callbacks of a kind that is disabled.
        "enable_progress_bar": any(is_lightning(c, "callbacks.ProgressBar") for c in callbacks),
        "enable_model_summary": spec.verbose > 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    if is_lightning_data(spec.data.data_module):
        given["limit_train_batches"] = spec.data.train_steps_per_epoch
        given["limit_val_batches"] = spec.data.validation_steps_per_epoch
    return given
