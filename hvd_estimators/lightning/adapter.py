"""A plain torch module, its optimizer and its loss as a LightningModule."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.package import LightningModule
from hvd_estimators.torch.collectives import PendingSum, current, exchange
from hvd_estimators.torch.loss import Evaluation, StepShare
from hvd_estimators.torch.metrics import EpochMetricStates
from hvd_estimators.torch.objective import Objective, RankObjective
from hvd_estimators.torch.tensors import Batch
from hvd_estimators.training.spec import EpochMetrics, TrainSpec


class ModuleAdapter(LightningModule):
    """LightningModule around a plain torch module, with a tensor per feature and a loss per label.

    The adapter trains the module as `TorchEstimator` does. It logs ``train_loss`` and ``val_loss``,
    and metrics as ``train_<name>`` and ``val_<name>``. `of_flavor` makes the class for either
    Lightning package.

    Parameters
    ----------
    module : torch.nn.Module
        The module to train.
    optimizer : torch.optim.Optimizer
        The user's optimizer.
    learning_rate : float or None
        Replaces the optimizer's rates.
    objects : tuple
        The objective and the objects of the param ``stateful``.
    has_own_step : bool
        Whether ``train_minibatch_fn`` runs the training steps.
    passes_per_step : int
        Backward passes per optimizer step, for ``train_minibatch_fn``.
    loss_parts : int
        The number of losses.

    Attributes
    ----------
    train_spec : TrainSpec or None
        The rank's spec, for loss constructors; the trainer sets it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: float | None,
        objects: tuple[Objective, Any],
        has_own_step: bool,
        passes_per_step: int,
        loss_parts: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.automatic_optimization = not has_own_step
        self.passes_per_step = passes_per_step
        self.train_spec: TrainSpec | None = None
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._objects = objects
        self._objective: Objective | None = None
        self._on_rank: RankObjective | None = None
        self._states: dict[str, EpochMetricStates] = {}
        # Whether the newest loss is scaled for its step over all ranks.
        self.scales_its_loss = False
        # The newest loss, scaled for its step, if the module scales it.
        self.step_loss: torch.Tensor | None = None
        # Whether to log `epoch_losses` instead of means over rows.
        self.counts_losses = False
        self.epoch_losses = torch.nn.ModuleDict(
            {f"{stage}_loss": EpochLoss(loss_parts) for stage in ("train", "val")}
        )
        self._stateful: Any = ()

    def forward(self, *inputs: Any, **named: torch.Tensor) -> Any:
        """Return the module's outputs."""
        return self.module(*inputs, **named)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the user's optimizer, bound to the module's parameters."""
        self._objective, self._stateful = self._objects
        for group in self._optimizer.param_groups if self._learning_rate is not None else ():
            group["lr"] = self._learning_rate
        return self._optimizer

    def on_fit_start(self) -> None:
        """Create the losses on this rank's device."""
        assert self._objective is not None
        self._on_rank = self._objective.on_rank(
            self.device,
            model=self.module,
            optimizer=self.optimizers(),
            rank=current().rank,
            size=current().size,
            spec=self.train_spec,
        )

    def training_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        objective, batch = self._ready(columns)
        strategy: Any = self.trainer.strategy
        share: StepShare = strategy.step_share
        if strategy.has_users_batches:
            # All batches of the step weigh the same, because a rank does not know the other ranks'
            # batches.
            share = dataclasses.replace(share, totals=self.totals([columns]))
        if objective.has_own_step:
            optimizer: Any = self.optimizers()
            averager, passes = strategy.averager, self.passes_per_step
            is_due = self._is_due(batch_idx)
            averager.weights.start(is_last=is_due)
            if self._skipped(batch_idx):
                averager.drop_used_gradients()
            with averager.averaging(accumulate=not is_due):
                evaluation = objective.run_minibatch(
                    self.module,
                    optimizer,
                    batch,
                    share=share,
                    passes_per_step=passes,
                    index=batch_idx + self._skipped(batch_idx),
                    weights=averager.weights,
                )
                if evaluation.step_loss is not None:
                    factor = averager.weights.factor_of(evaluation)
                    self.scales_its_loss = True
                    with contextlib.nullcontext() if is_due else strategy.block_backward_sync():
                        self.manual_backward(evaluation.step_loss * (factor / passes))
            if is_due and evaluation.step_loss is not None:
                optimizer.step()
                optimizer.zero_grad()
            return self._logged("train", evaluation)
        evaluation = objective.evaluate(self, batch, share)
        loss = self._logged("train", evaluation)
        self.scales_its_loss = not evaluation.is_row_mean
        self.step_loss = None
        if evaluation.is_row_mean:
            return loss
        step_loss = evaluation.step_loss
        assert step_loss is not None
        if evaluation.stated is None:
            strategy.weights.step_factor(None, share.rows)
        else:
            weight = strategy.weight_of(evaluation.stated, loss.device)
            step_loss = evaluation.loss * weight if evaluation.stated > 0 else step_loss
        self.step_loss = step_loss.detach()
        # The value is the batch's own loss; the gradient belongs to the batch's part of the step's
        # loss.
        return loss.detach() + step_loss - step_loss.detach()

    def totals(self, window: Sequence[Mapping[str, torch.Tensor]]) -> PendingSum | None:
        """Return the step's label-dependent denominators. Called by all ranks."""
        assert self._on_rank is not None
        return self._on_rank.totals(window)

    def _skipped(self, batch_idx: int) -> int:
        """Return the batches that the last step of an epoch lacks, if the batch is one of it.

        The user's function steps after the number of the last batch, which is increased by them.
        """
        batches, passes = int(self.trainer.num_training_batches), self.passes_per_step
        return -batches % passes if batch_idx >= batches - batches % passes else 0

    def _is_due(self, batch_idx: int) -> bool:
        """Return whether a step follows the batch."""
        return (batch_idx + 1) % self.passes_per_step == 0 or self.trainer.is_last_batch

    def validation_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a validation batch."""
        objective, batch = self._ready(columns)
        return self._logged("val", objective.evaluate(self, batch))

    @property
    def users_objects(self) -> dict[str, Any]:
        """The user's objects that may have state, by param."""
        assert self._on_rank is not None
        return {"stateful": self._stateful, **self._on_rank.users_objects}

    def _ready(self, columns: Mapping[str, torch.Tensor]) -> tuple[RankObjective, Batch]:
        assert self._on_rank is not None
        assert self._objective is not None
        return self._on_rank, self._objective.tensors.batch(columns, self.device)

    def on_train_epoch_end(self) -> None:
        """Log the torchmetrics metrics over the training rows of all ranks."""
        self._log_states("train")

    def on_validation_epoch_end(self) -> None:
        """Log the torchmetrics metrics over the validation rows of all ranks."""
        self._log_states("val")

    def _log_states(self, stage: str) -> None:
        states = self._states.pop(stage, None)
        assert self._on_rank is not None
        metrics = self._on_rank.metrics
        if states is None or not metrics.have_state:
            return
        ranks = exchange.gather(states.capture(), "lightning.metrics")
        groups = metrics.by_group(states.values([part for rank in ranks for part in rank]))
        for _, _, name, value in EpochMetrics(0, {"all_metrics": groups}).rows():
            self.log(f"{stage}_{name}", value)

    def _logged(self, stage: str, evaluation: Evaluation) -> torch.Tensor:
        assert self._on_rank is not None
        measured: dict[str, Any] = {
            "loss": evaluation.loss,
            **self._on_rank.metrics(evaluation),
        }
        if not evaluation.is_row_mean or self._on_rank.has_own_step:
            self.counts_losses = True
            measured["loss"] = self.epoch_losses[f"{stage}_loss"]
            measured["loss"].update(evaluation.numerators())
        for name, value in measured.items():
            self.log(
                f"{stage}_{name}",
                value,
                on_step=False,
                on_epoch=True,
                batch_size=evaluation.rows,
            )
        if self._on_rank.metrics.have_state:
            states = self._states.setdefault(stage, EpochMetricStates(self._on_rank.metrics))
            strategy: Any = self.trainer.strategy
            if not strategy.has_no_rows:
                states.update(evaluation)
        return evaluation.loss


def users_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module: the one in an adapter, or the LightningModule itself."""
    return module.module if isinstance(module, ModuleAdapter) else module


class EpochLoss(Metric):
    """Epoch loss: numerators over denominators, both over the rows of all ranks.

    Parameters
    ----------
    parts : int
        The number of losses; each may have its own denominator.
    """

    full_state_update = False

    def __init__(self, parts: int) -> None:
        super().__init__()
        zeros = torch.zeros((2, parts), dtype=torch.float64)
        self.sums: torch.Tensor
        self.add_state("sums", default=zeros, dist_reduce_fx="sum")

    def update(self, counted: torch.Tensor) -> None:
        """Add a batch; see `Loss.counted`."""
        self.sums[:, : counted.shape[1]] += counted

    def compute(self) -> torch.Tensor:
        """Return the loss. A denominator of 0 marks a sum, which is not divided."""
        numerators, denominators = self.sums
        return (numerators / torch.where(denominators > 0, denominators, 1.0)).sum()
