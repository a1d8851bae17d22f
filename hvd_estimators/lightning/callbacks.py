"""The trainer's own callbacks: history and progress, a check for NaN.

Written for either of Lightning's packages: `of_flavor` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch

from hvd_estimators.launch.rank.liveness import made_progress
from hvd_estimators.lightning.adapter import ModuleAdapter
from hvd_estimators.lightning.bases import Callback, Checkpoint
from hvd_estimators.lightning.loaders import TrainLoader, ValidationLoader
from hvd_estimators.lightning.results import results_of
from hvd_estimators.torch.finite import not_finite
from hvd_estimators.torch.loss import as_stated
from hvd_estimators.torch.shards import BufferReducer
from hvd_estimators.training.finite import FiniteCheck
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.shards import ShardStates
from hvd_estimators.training.spec import EpochMetrics

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["EpochRecorder", "TerminateOnNaN", "steps_taken"]


class EpochRecorder(Checkpoint):
    """Keeps what was measured in each epoch, and tells the driver.

    A ``Checkpoint``, because Lightning calls those last: when all values of an epoch are there.

    Parameters
    ----------
    progress : Progress
        Reports to the driver.
    train, validation : loader, optional
        Tell what batches count for.
    shards : ShardStates
        The shards that the rank plays.
    buffers : BufferReducer
        Reduces the module's buffers.
    """

    def __init__(
        self,
        progress: Progress,
        train: TrainLoader | None,
        validation: ValidationLoader | None,
        shards: ShardStates,
        buffers: BufferReducer,
    ) -> None:
        self._shards = shards
        self._buffers = buffers
        self.history: list[EpochMetrics] = []
        self._progress = progress
        self._loaders = train, validation
        self._losses = _Mean(), _Mean()
        self._validated = False
        self._batches = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch."""
        self._progress.start_epoch(trainer.current_epoch)
        self._losses = _Mean(), _Mean()
        self._validated = False
        self._batches = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the loss of a training batch."""
        self._batches += 1
        passes = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self._count(0, outputs, batch, passes)
        if self._progress.due:
            self._progress.step(
                (batch_idx + 1) // self._shards.passes, self._losses[0].as_dict("loss")
            )

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the loss of a validation batch, where the module returns it."""
        made_progress()
        self._count(1, outputs, batch, 1)
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the epoch.

        Raises
        ------
        RuntimeError
            If there was no batch in it.
        """
        if not self._batches:
            raise RuntimeError(
                f"The training loader had no batch in epoch {trainer.current_epoch}. A data module "
                "must give loaders that can be iterated in every epoch, with rows on every rank."
            )
        self._buffers.reduce()
        for loss in self._losses:
            loss.reduce()
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        train, validation = (
            {**loss.as_dict("loss"), **{n: v for n, v in logged.items() if n in results.names()}}
            for loss, results in zip(self._losses, results_of(trainer), strict=True)
        )
        if isinstance(pl_module, ModuleAdapter) and pl_module.counts_losses:
            for stage, measured in (("train", train), ("val", validation)):
                if f"{stage}_loss" in measured:
                    measured["loss"] = measured[f"{stage}_loss"]
        record = EpochMetrics(trainer.current_epoch, train, validation if self._validated else None)
        self.history.append(record)
        self._progress.record(record)
        named = {f"val_{n.removeprefix('val_')}": v for n, v in (record.validation or {}).items()}
        self._progress.end_epoch({**train, **named})

    def state(self) -> dict[str, Any]:
        """Return what has been measured of an epoch that is on its way, on this rank."""
        return {
            "sums": [loss.sums() for loss in self._losses],
            "validated": self._validated,
            "batches": self._batches,
        }

    def restore(self, trainer: Trainer, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with an epoch from what ranks had measured in whose place this one is."""
        self._progress.start_epoch(trainer.current_epoch)
        self._losses = _Mean(), _Mean()
        for state in states:
            for loss, sums in zip(self._losses, state["sums"], strict=True):
                loss.add_sums(*sums)
        self._validated = any(state["validated"] for state in states)
        self._batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed

    def _count(self, stage: int, outputs: Any, batch: Any, passes: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        loader = self._loaders[stage]
        weight: Any = 1.0 if loader is None else float(loader.share.rows)
        _, stated = as_stated(outputs, "the step of the LightningModule")
        if stated is not None:
            if not (weight and stated > 0):
                return
            weight = stated
        self._losses[stage].add(loss.detach().reshape(()).double() * passes, weight)


class _Mean:
    """A weighted mean; the sums stay where the values are, so that steps do not wait for a GPU."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._weight: Any = 0.0

    def add(self, value: Any, weight: Any) -> None:
        self._sum = self._sum + value * weight
        self._weight = self._weight + weight

    def sums(self) -> tuple[float, float]:
        return float(self._sum), float(self._weight)

    def add_sums(self, total: float, weight: float) -> None:
        self._sum, self._weight = self._sum + total, self._weight + weight

    def reduce(self) -> None:
        sums = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64)
        self._sum, self._weight = hvd.allreduce(sums, op=hvd.Sum).tolist()

    def as_dict(self, name: str) -> dict[str, float]:
        weight = float(self._weight)
        return {name: float(self._sum) / weight} if weight else {}


class TerminateOnNaN(Callback):
    """Ends training, on all ranks together, when a loss or a parameter is NaN or infinite.

    Parameters
    ----------
    check : FiniteCheck
        Asks the other ranks.
    """

    def __init__(self, check: FiniteCheck) -> None:
        self._check = check
        self._steps = 0
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the steps of earlier parts of the run."""
        self._steps = steps_taken(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look, after a step, at the losses of its batches and at the parameters.

        Raises
        ------
        NotFiniteError
            If one is not finite, on any rank.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss)
        before, self._steps = self._steps, steps_taken(trainer)
        if self._steps != before:
            found = not_finite(pl_module, self._losses)
            self._losses = []
            self._check.after_step(self._steps, trainer.current_epoch, *found)


def steps_taken(trainer: Trainer) -> int:
    """Return the optimizer steps of the run; batches where a module hides its steps."""
    if trainer.global_step or trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1
