"""The trainer's own callbacks: history, progress, NaN checks and stopping.

The callbacks work with either Lightning package; `of_flavor` makes the classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.lightning.loaders import ValidationLoader
from hvd_estimators.lightning.package import Callback, Checkpoint, patch_method
from hvd_estimators.lightning.results import epoch_values, step_values
from hvd_estimators.torch.collectives import current, not_finite, sum_over_ranks
from hvd_estimators.torch.loss_weights import as_stated
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.spec import EpochMetrics
from hvd_estimators.training.step_control import StepControl

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def agree_on_stopping(trainer: Trainer, every: int) -> Callable[[], None]:
    """Make all ranks stop at the same step.

    The module or a callback of one rank may set ``trainer.should_stop``, for example because of the
    rank's own loss. The other ranks would then wait for that rank indefinitely. Therefore the ranks
    agree at the start of an epoch, after each validation and after each epoch. They also agree
    after some batches; between these, a stop waits.

    Parameters
    ----------
    trainer : Trainer
        The Trainer.
    every : int
        The number of batches between two agreements.

    Returns
    -------
    callable
        Restores the trainer.
    """
    loop: Any = trainer.fit_loop
    is_postponed = False

    def agree() -> None:
        nonlocal is_postponed
        stops = float(trainer.should_stop or is_postponed)
        trainer.should_stop = sum_over_ranks(stops, name="should_stop") > 0
        is_postponed = False

    def after_batch() -> None:
        nonlocal is_postponed
        if loop.epoch_loop.batch_progress.current.completed % every == 0:
            agree()
        else:
            is_postponed, trainer.should_stop = is_postponed or trainer.should_stop, False

    undo = contextlib.ExitStack()
    undo.enter_context(patch_method(loop.epoch_loop, "on_run_start", after=agree))
    undo.enter_context(patch_method(loop.epoch_loop, "on_advance_end", before=after_batch))
    undo.enter_context(patch_method(loop.epoch_loop.val_loop, "run", after=agree))
    undo.enter_context(patch_method(loop, "on_advance_end", after=agree))
    return undo.close


class ValueReducer(Checkpoint):
    """Reduce values that hooks log at the end of a training epoch, before others monitor them.

    Lightning calls the ``on_train_epoch_end`` of checkpoint callbacks after the module's.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce the values."""
        strategy: Any = trainer.strategy
        strategy.reduce_logged()


class EpochRecorder(Checkpoint):
    """Record each epoch's metrics, and report them to the driver.

    A validation's metrics are the ones of the epoch's last validation. Training may log the same
    names, which replaces a validation's values in ``trainer.callback_metrics``.

    The class is a ``Checkpoint`` because Lightning calls checkpoint callbacks last, when all values
    of an epoch are available.

    Parameters
    ----------
    progress : Progress
        Reports to the driver.
    validation : loader, optional
        Provides the weights of validation batches.
    """

    def __init__(self, progress: Progress, validation: ValidationLoader | None) -> None:
        self.history: list[EpochMetrics] = []
        self._progress = progress
        self._validation = validation
        self._start()

    def _start(self) -> None:
        self._loss, self._val_loss = _Mean(), _Mean()
        self._validated: dict[str, float] | None = None
        self._batches = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start an epoch."""
        self._progress.start_epoch(trainer.current_epoch)
        self._start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of a training batch."""
        self._batches += 1
        for output, rows in _outputs_of_shards(trainer, outputs):
            _count(self._loss, output, rows)
        if self._progress.count_step():
            self._progress.step(batch_idx + 1, self._loss.as_dict("loss"))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a validation, of which an epoch may have several."""
        self._val_loss = _Mean()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add the loss of a validation batch, if the module returns it."""
        made_progress()
        rows = 1 if self._validation is None else self._validation.rows
        _count(self._val_loss, outputs, rows)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the values that the validation has logged."""
        self._validated = epoch_values(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the epoch.

        Raises
        ------
        RuntimeError
            If the epoch had no batch.
        """
        if not self._batches:
            raise RuntimeError(
                f"The training loader had no batch in epoch {trainer.current_epoch}. A data module "
                "must give loaders that can be iterated in every epoch, with rows on every rank."
            )
        for loss in (self._loss, self._val_loss):
            loss.reduce()
        loss_of_epoch = self._loss.as_dict("loss")
        train = {**step_values(trainer), **loss_of_epoch, **epoch_values(trainer)}
        validation = self._validated
        if validation is not None:
            validation = {**self._val_loss.as_dict("loss"), **validation}
        record = EpochMetrics(trainer.current_epoch, train, validation)
        self.history.append(record)
        self._progress.record(record)
        named = {f"val_{n.removeprefix('val_')}": v for n, v in (record.validation or {}).items()}
        self._progress.end_epoch({**train, **named})


def _count(mean: _Mean, outputs: Any, rows: int) -> None:
    """Add the loss that a step returned, if any."""
    loss = _loss_in(outputs)
    if loss is None or loss.numel() != 1:
        return
    _, stated = as_stated(outputs, "the step of the LightningModule")
    weight: Any = float(rows) if stated is None else stated
    if not weight > 0:
        return
    mean.add(loss.detach().reshape(()).double(), weight)


def _loss_in(outputs: Any) -> torch.Tensor | None:
    """Return the loss that a step returned, if any."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss if isinstance(loss, torch.Tensor) else None


def _outputs_of_shards(trainer: Trainer, outputs: Any) -> list[tuple[Any, int]]:
    """Return the outputs of the newest batch, one per shard of this rank, with their rows."""
    given: list[tuple[Any, int]] = getattr(trainer.strategy, "outputs", [(outputs, 1)])
    return given


class _Mean:
    """Weighted mean with sums on the values' device, so that steps do not wait for a GPU."""

    def __init__(self) -> None:
        self._sum: Any = 0.0
        self._weight: Any = 0.0

    def add(self, value: Any, weight: Any) -> None:
        self._sum = self._sum + value * weight
        self._weight = self._weight + weight

    def reduce(self) -> None:
        sums = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64)
        self._sum, self._weight = current().reduce(sums, "sum").tolist()

    def as_dict(self, name: str) -> dict[str, float]:
        weight = float(self._weight)
        return {name: float(self._sum) / weight} if weight else {}


class TerminateOnNaN(Callback):
    """End training, on all ranks together, if a loss or a parameter is NaN or infinite.

    Parameters
    ----------
    control : StepControl
        Shares the result with the other ranks.
    """

    def __init__(self, control: StepControl) -> None:
        self._control = control
        self._steps = 0
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the number of steps in earlier parts of the run."""
        self._steps = steps_taken(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the parameters after a step, and the losses of the step's batches.

        Raises
        ------
        NotFiniteError
            If a loss or a parameter is not finite on any rank.
        """
        for output, _ in _outputs_of_shards(trainer, outputs):
            loss = _loss_in(output)
            if loss is not None:
                self._losses.append(loss.detach())
        before, self._steps = self._steps, steps_taken(trainer)
        if self._steps != before:
            losses, self._losses = self._losses, []
            values = not_finite(pl_module, losses)
            self._control.check_finite(self._steps, trainer.current_epoch, *values)


def steps_taken(trainer: Trainer) -> int:
    """Return the run's optimizer steps; its batches if the module hides its steps."""
    if trainer.global_step or trainer.lightning_module.automatic_optimization:
        return trainer.global_step
    return trainer.fit_loop.total_batch_idx + 1
