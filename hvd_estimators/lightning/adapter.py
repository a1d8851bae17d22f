"""A plain torch module, its optimizer and its loss as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.lightning.bases import LightningModule
from hvd_estimators.lightning.collectives import gather_objects
from hvd_estimators.torch.metrics import EpochMetricStates
from hvd_estimators.torch.objective import Evaluation, Objective, RankObjective
from hvd_estimators.torch.serialization import load_optimizer
from hvd_estimators.torch.tensors import Batch
from hvd_estimators.training.spec import EpochMetrics, TrainSpec

__all__ = ["ModuleAdapter"]


class ModuleAdapter(LightningModule):
    """Trains a module as `TorchEstimator` does: one tensor per feature column, one loss per label.

    It logs ``train_loss`` and ``val_loss``, and metrics as ``train_<name>`` and ``val_<name>``.
    `of_flavor` makes it for either of Lightning's packages.

    Parameters
    ----------
    module : torch.nn.Module
        What is trained.
    optimizer : bytes
        See `dump_optimizer`.
    objective : Objective
        Losses, metrics, and how columns become the tensors that they take.
    passes_per_step : int
        Backward passes of a step, for ``train_minibatch_fn``.

    Attributes
    ----------
    train_spec : TrainSpec or None
        What the rank was told, for loss constructors; the trainer sets it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: bytes,
        objective: Objective,
        passes_per_step: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.automatic_optimization = objective.train_minibatch_fn is None
        self.passes_per_step = passes_per_step
        self.train_spec: TrainSpec | None = None
        self._optimizer = optimizer
        self._objective = objective
        self._on_rank: RankObjective | None = None
        self._states: dict[str, EpochMetricStates] = {}

    def forward(self, *inputs: Any, **named: torch.Tensor) -> Any:
        """Return the module's outputs."""
        return self.module(*inputs, **named)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the user's optimizer, bound to the module's parameters."""
        return load_optimizer(self._optimizer, self.module)

    def on_fit_start(self) -> None:
        """Make the losses on this rank's device."""
        self._on_rank = self._objective.on_rank(
            self.device,
            model=self.module,
            optimizer=self.optimizers(),
            rank=hvd.rank(),
            size=hvd.size(),
            spec=self.train_spec,
        )

    def training_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        objective, batch = self._ready(columns)
        if objective.has_own_step:
            strategy: Any = self.trainer.strategy
            evaluation = objective.run_minibatch(
                self.module,
                self.optimizers(),
                batch,
                factor=strategy.factor,
                passes_per_step=self.passes_per_step,
                index=batch_idx,
            )
        else:
            evaluation = objective.evaluate(self, batch)
        return self._logged("train", evaluation)

    def validation_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a validation batch."""
        objective, batch = self._ready(columns)
        return self._logged("val", objective.evaluate(self, batch))

    def _ready(self, columns: Mapping[str, torch.Tensor]) -> tuple[RankObjective, Batch]:
        assert self._on_rank is not None
        return self._on_rank, self._objective.tensors.batch(columns, self.device)

    def on_train_epoch_end(self) -> None:
        """Log the metrics of torchmetrics over the training rows of all ranks."""
        self._log_states("train")

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of torchmetrics over the validation rows of all ranks."""
        self._log_states("val")

    def _log_states(self, stage: str) -> None:
        states = self._states.pop(stage, None)
        assert self._on_rank is not None
        metrics = self._on_rank.metrics
        if states is None or not metrics.have_state:
            return
        ranks = gather_objects(states.capture())
        groups = metrics.by_group(states.values([part for rank in ranks for part in rank]))
        for _, _, name, value in EpochMetrics(0, {"all_metrics": groups}).rows():
            self.log(f"{stage}_{name}", value)

    def _logged(self, stage: str, evaluation: Evaluation) -> torch.Tensor:
        assert self._on_rank is not None
        measured = {"loss": evaluation.loss, **self._on_rank.metrics(evaluation)}
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
