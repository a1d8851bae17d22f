"""A plain torch module, its optimizer and its loss as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.lightning.bases import LightningModule
from hvd_estimators.torch.calls import call_with_known, call_with_leading
from hvd_estimators.torch.checks import check_weightable
from hvd_estimators.torch.serialization import load_optimizer
from hvd_estimators.torch.tensors import Batch, Loss, TensorSpec

__all__ = ["ModuleAdapter"]


class ModuleAdapter(LightningModule):
    """Trains a module as `TorchEstimator` does: one tensor per feature column, one loss per label.

    It logs ``train_loss`` and ``val_loss``, and metrics as ``train_group_<i>_<label>`` and
    ``val_group_<i>_<label>``. `of_flavor` makes it for either of Lightning's packages.

    Parameters
    ----------
    module : torch.nn.Module
        What is trained.
    optimizer : bytes
        See `dump_optimizer`.
    tensors : TensorSpec
        How columns become tensors.
    losses : sequence of callable, or None
        One loss per label; None where ``loss_constructors`` make them.
    loss_constructors : sequence of callable, or None
        Make the losses on the rank.
    loss_weights : sequence of float
        One weight per label.
    metrics : sequence of sequence of callable
        Groups of metrics; a group of one is applied to every output.
    train_minibatch_fn : callable or None
        Takes the place of forward pass, backward pass and step.
    passes_per_step : int
        Backward passes of a step, for ``train_minibatch_fn``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: bytes,
        tensors: TensorSpec,
        losses: Sequence[Callable[..., torch.Tensor]] | None,
        loss_constructors: Sequence[Callable[..., Any]] | None,
        loss_weights: Sequence[float],
        metrics: Sequence[Sequence[Callable[..., Any]]],
        train_minibatch_fn: Callable[..., Any] | None,
        passes_per_step: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.automatic_optimization = train_minibatch_fn is None
        self.passes_per_step = passes_per_step
        self._optimizer = optimizer
        self._tensors = tensors
        self._losses = losses
        self._loss_constructors = loss_constructors
        self._loss_weights = loss_weights
        self._metric_groups = metrics
        self._train_minibatch_fn = train_minibatch_fn
        self._loss: Loss | None = None

    def forward(self, *inputs: Any, **named: torch.Tensor) -> Any:
        """Return the module's outputs."""
        return self.module(*inputs, **named)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the user's optimizer, bound to the module's parameters."""
        return load_optimizer(self._optimizer, self.module)

    def on_fit_start(self) -> None:
        """Make the losses on this rank's device."""
        losses = self._losses
        if losses is None:
            offered = {
                "model": self.module,
                "optimizer": self.optimizers(),
                "device": self.device,
                "rank": hvd.rank(),
                "size": hvd.size(),
            }
            constructors = self._loss_constructors or ()
            losses = [call_with_known(make, offered) for make in constructors]
            if self._tensors.sample_weight_col is not None:
                check_weightable(losses, "loss_constructors")
        on_device = [
            loss.to(self.device) if isinstance(loss, torch.nn.Module) else loss for loss in losses
        ]
        self._loss = Loss(on_device, self._loss_weights)

    def training_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        batch = self._tensors.batch(columns, self.device)
        if self._train_minibatch_fn is None:
            return self._measured("train", batch, self._tensors.call(self, batch.inputs))
        return self._run_minibatch(batch, batch_idx)

    def validation_step(self, columns: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a validation batch."""
        batch = self._tensors.batch(columns, self.device)
        return self._measured("val", batch, self._tensors.call(self, batch.inputs))

    def _measured(self, stage: str, batch: Batch, raw: Any) -> torch.Tensor:
        outputs, labels = self._tensors.align(raw, batch.labels)
        assert self._loss is not None
        loss = self._loss(outputs, labels, batch.weights)
        self._log_all(stage, loss, batch, outputs, labels)
        return loss

    def _run_minibatch(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        computed: list[torch.Tensor] = []

        def scaled_loss(outputs: Any, labels: Any, weights: Any = None) -> torch.Tensor:
            assert self._loss is not None
            computed.append(self._loss(outputs, labels, weights))
            return computed[-1] * strategy.factor

        assert self._train_minibatch_fn is not None
        raw, returned = call_with_leading(
            self._train_minibatch_fn,
            self.module,
            self.optimizers(),
            self._tensors.align,
            scaled_loss,
            self._tensors.arguments(batch.inputs),
            batch.labels,
            batch.weights,
            self.passes_per_step,
            batch_idx,
        )
        # What the function returns may be divided or scaled already.
        loss: torch.Tensor = (computed[-1] if computed else returned).detach()
        outputs, labels = self._tensors.align(raw, batch.labels)
        self._log_all("train", loss, batch, outputs, labels)
        return loss

    def _log_all(
        self,
        stage: str,
        loss: torch.Tensor,
        batch: Batch,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
    ) -> None:
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, batch_size=batch.rows)
        names = self._tensors.label_cols
        for index, group in enumerate(self._metric_groups):
            members = list(group) * len(names) if len(group) == 1 else group
            for metric, name, output, label in zip(members, names, outputs, labels, strict=True):
                self.log(
                    f"{stage}_group_{index}_{name}",
                    metric(output.detach(), label),
                    on_step=False,
                    on_epoch=True,
                    batch_size=batch.rows,
                )
