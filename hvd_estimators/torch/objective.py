"""What a torch module is trained for: losses and their weights, metrics, a user's own step.

`TorchEstimator` and `LightningEstimator` (for plain modules) share it. Used on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.calls import call_with_known, call_with_leading
from hvd_estimators.torch.joint_loss import JointLoss, check_joint
from hvd_estimators.torch.loss import Loss, check_weightable
from hvd_estimators.torch.metrics import Metric, Metrics
from hvd_estimators.torch.tensors import Batch, TensorSpec

__all__ = ["Evaluation", "Objective", "RankObjective"]


@dataclass(frozen=True)
class Objective:
    """What the driver tells the ranks about it.

    Attributes
    ----------
    tensors : TensorSpec
        How columns become the tensors that model, losses and metrics take.
    losses : tuple of callable, or None
        One loss per label, or a single joint one; None if ``loss_constructors`` make them, or if
        ``train_minibatch_fn`` computes its own.
    loss_constructors : tuple of callable, or None
        Make the losses on the rank, one per label, or a single joint one.
    loss_weights : tuple of float
        One weight per label.
    metrics : tuple of tuple of callable
        Groups of metrics, see `Metrics`.
    train_minibatch_fn : callable or None
        Replaces forward pass, backward pass and step.
    joint : bool
        Whether one loss takes all outputs and labels.
    upstream_names : bool
        See `Metrics`.
    """

    tensors: TensorSpec
    losses: tuple[Callable[..., torch.Tensor], ...] | None
    loss_constructors: tuple[Callable[..., Any], ...] | None
    loss_weights: tuple[float, ...]
    metrics: tuple[tuple[Metric, ...], ...]
    train_minibatch_fn: Callable[..., tuple[Any, torch.Tensor]] | None
    joint: bool = False
    upstream_names: bool = False

    @property
    def named_metrics(self) -> Metrics:
        """The metrics, by name."""
        return Metrics(self.metrics, self.tensors.label_cols, self.upstream_names)

    def on_rank(self, device: torch.device, **offered: Any) -> RankObjective:
        """Return what measures batches. Runs on the worker.

        Parameters
        ----------
        device : torch.device
            The rank's device; losses that are modules are moved there.
        **offered
            What loss constructors can take besides ``device``: model, optimizer, rank, size, spec.

        Raises
        ------
        ParamError
            If there are sample weights, and a loss that was made here cannot be weighted by row.
        """
        losses: Sequence[Callable[..., torch.Tensor]] | None = self.losses
        if losses is None and self.loss_constructors is not None:
            offered = {"device": device, **offered}
            losses = [call_with_known(make, offered) for make in self.loss_constructors]
            weighted = self.tensors.sample_weight_col is not None
            if self.joint:
                check_joint(losses[0], weighted, "loss_constructors")
            elif weighted:
                check_weightable(losses, "loss_constructors")
        if losses is None:
            return RankObjective(self, None)
        on_device = [
            loss.to(device) if isinstance(loss, torch.nn.Module) else loss for loss in losses
        ]
        if self.joint:
            return RankObjective(self, JointLoss(on_device[0]))
        return RankObjective(self, Loss(on_device, self.loss_weights))


@dataclass(frozen=True)
class Evaluation:
    """What a model gave for a batch.

    Attributes
    ----------
    loss : torch.Tensor
        The batch's mean loss, sample weights included; a scalar.
    outputs, labels : list of torch.Tensor
        One per label, in the shapes in which they are compared. If one loss takes all outputs and
        labels, they need not be as many.
    rows : int
        Rows of the batch.
    """

    loss: torch.Tensor
    outputs: Sequence[torch.Tensor]
    labels: Sequence[torch.Tensor]
    rows: int


class RankObjective:
    """An objective with its losses, on a rank's device. Runs on the worker.

    Attributes
    ----------
    metrics : Metrics
        The metrics.
    """

    def __init__(self, objective: Objective, loss: Loss | JointLoss | None) -> None:
        self._tensors = objective.tensors
        self._loss = loss
        self._train_minibatch_fn = objective.train_minibatch_fn
        self.metrics = objective.named_metrics

    @property
    def has_own_step(self) -> bool:
        """Whether `run_minibatch` is to be called for training."""
        return self._train_minibatch_fn is not None

    @property
    def users_objects(self) -> dict[str, Any]:
        """What may have state that training goes on from, by name of its param."""
        losses = [] if self._loss is None else self._loss.functions
        return {"train_minibatch_fn": self._train_minibatch_fn, "loss": losses}

    def evaluate(self, module: torch.nn.Module, batch: Batch) -> Evaluation:
        """Return a batch's loss, for a backward pass."""
        raw = self._tensors.call(module, batch.inputs)
        outputs, labels = self._arranged(raw, batch.labels)
        return self._evaluation(self._computed(outputs, labels, batch.weights, batch), raw, batch)

    def run_minibatch(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        batch: Batch,
        *,
        factor: float,
        passes_per_step: int,
        index: int,
    ) -> Evaluation:
        """Let the user's function train on a batch.

        Parameters
        ----------
        module, optimizer
            What it trains.
        batch : Batch
            At least one row.
        factor : float
            What weights this rank's gradient; see `WeightedBatches`.
        passes_per_step : int
            Batches of a step.
        index : int
            The batch's number in its epoch.
        """
        computed: list[torch.Tensor] = []

        def scaled_loss(outputs: Any, labels: Any, weights: Any = None) -> torch.Tensor:
            computed.append(self._computed(outputs, labels, weights, batch))
            return computed[-1] * factor

        assert self._train_minibatch_fn is not None
        raw, returned = call_with_leading(
            self._train_minibatch_fn,
            module,
            optimizer,
            self._arranged,
            scaled_loss,
            self._tensors.arguments(batch.inputs),
            batch.labels,
            batch.weights,
            passes_per_step,
            index,
        )
        # What the function returns may be divided or scaled already.
        loss = (computed[-1] if computed else returned).detach()
        return self._evaluation(loss, raw, batch)

    def _arranged(self, raw: Any, labels: Any) -> tuple[Any, Any]:
        """Return outputs and labels as the loss takes them."""
        if isinstance(self._loss, JointLoss):
            return raw, labels
        return self._tensors.align(raw, labels)

    def _computed(self, outputs: Any, labels: Any, weights: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of arranged outputs and labels."""
        if self._loss is None:
            raise ParamError(
                "loss is not set, and train_minibatch_fn calls loss_fn. Set loss, or let "
                "train_minibatch_fn compute its own."
            )
        if isinstance(self._loss, JointLoss):
            inputs = self._tensors.arguments(batch.inputs)
            return self._loss(outputs=outputs, labels=labels, inputs=inputs, sample_weights=weights)
        return self._loss(outputs, labels, weights)

    def _evaluation(self, loss: torch.Tensor, raw: Any, batch: Batch) -> Evaluation:
        outputs, labels = self._tensors.align(raw, batch.labels)
        return Evaluation(loss, outputs, labels, batch.rows)
