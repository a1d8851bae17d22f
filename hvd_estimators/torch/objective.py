"""Training objective of a torch module: losses, weights, metrics and the user's own step.

Runs on the driver and on the ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.torch.collectives import current
from hvd_estimators.torch.loss import Evaluation, Loss, is_sum
from hvd_estimators.torch.loss_weights import (
    LossParts,
    StepLoss,
    StepWeights,
    WeightedLoss,
    as_stated,
    measured,
)
from hvd_estimators.torch.metrics import Metric, Metrics
from hvd_estimators.torch.tensors import (
    AnyColumns,
    Batch,
    TensorSpec,
    call_with_leading,
    require_tensors,
)
from hvd_estimators.training.row_weights import check_rank

LOSS_FORMS = ("per_label", "joint")
"""Loss forms: one loss per output and label, or a single loss over all outputs and labels."""


class JointLoss(LossParts):
    """Single loss over all outputs and labels, such as a variational autoencoder's.

    Parameters
    ----------
    function : callable
        Called with these keyword arguments, as far as it takes them:

        - ``outputs``: the module's return value;
        - ``labels``: a list with one tensor per label column;
        - ``inputs``: the module's inputs, as a list, or as a dict if ``input_form`` has names;
        - ``sample_weights``.

        Returns the mean over a batch, or ``{"loss": ..., "denominator": ...}`` for a mean over
        something else. A function with ``reduction="sum"``, see `is_sum`, returns a sum.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__([1.0])
        self.functions = [function]
        self._is_sum = is_sum(function)

    def __call__(self, **offered: Any) -> torch.Tensor:
        """Return the loss of a batch as a scalar tensor."""
        (part,) = self.parts(0, **offered)
        return part.mean

    def parts(self, rows: int, **offered: Any) -> list[WeightedLoss]:
        """Return the loss of a batch of ``rows`` rows as a single part."""
        value, stated = as_stated(_call_with_known(self.functions[0], offered), "loss")
        if stated is not None:
            return [WeightedLoss(value, stated, "stated")]
        return [WeightedLoss(value, 0.0, "sum") if self._is_sum else WeightedLoss(value, rows)]


def check_joint(function: Callable[..., Any], param: str = "loss") -> None:
    """Check that a joint loss takes sample weights.

    Raises
    ------
    ParamError
        If it does not: it would ignore them.
    """
    parameters = _parameters(function)
    if not any(p.kind is p.VAR_KEYWORD or p.name == "sample_weights" for p in parameters):
        names = ", ".join(p.name for p in parameters)
        raise ParamError(
            f"{param}: sample_weight_col is set, and the joint loss takes no sample_weights, found "
            f"{names}. Let it take sample_weights and return (sample_weights * losses).mean(), or "
            "leave sample_weight_col out."
        )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    # The signature of module.__call__ is the same for all modules.
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return list(inspect.signature(called).parameters.values())


@dataclass(frozen=True)
class Objective:
    """Objective as the driver sends it to the ranks.

    Attributes
    ----------
    tensors : TensorSpec
        Conversion of columns to the tensors of model, losses and metrics.
    losses : tuple of callable, or None
        One loss per label, or a single joint loss. None if ``loss_constructors`` create the losses,
        or if ``train_minibatch_fn`` computes its own.
    loss_constructors : tuple of callable, or None
        Create the losses on the rank, one per label, or a single joint loss.
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
    class_weight : mapping of int to float, or None
        Factors by which training multiplies the weights of rows; see `class_weights`.
    """

    tensors: TensorSpec
    losses: tuple[Callable[..., torch.Tensor], ...] | None
    loss_constructors: tuple[Callable[..., Any], ...] | None
    loss_weights: tuple[float, ...]
    metrics: tuple[tuple[Metric, ...], ...]
    train_minibatch_fn: Callable[..., tuple[Any, torch.Tensor]] | None
    joint: bool = False
    upstream_names: bool = False
    class_weight: Mapping[int, float] | None = None

    @property
    def is_weighted(self) -> bool:
        """Return whether rows have weights."""
        return self.tensors.sample_weight_col is not None or bool(self.class_weight)

    @property
    def named_metrics(self) -> Metrics:
        """Metrics by name."""
        return Metrics(self.metrics, self.tensors.label_cols, self.upstream_names)

    def check_losses(self, losses: Sequence[Callable[..., Any]], param: str = "loss") -> None:
        """Check that a joint loss takes the weights of rows, if there are any."""
        if self.joint and self.is_weighted:
            check_joint(losses[0], param)

    def check_arguments(self, offered: Collection[str]) -> None:
        """Check that loss constructors need no arguments but these. Runs on the driver.

        Raises
        ------
        ParamError
            If one does.
        """
        for make in self.loss_constructors or ():
            needed = (p for p in _parameters(make) if p.default is p.empty)
            others = [
                p.name
                for p in needed
                if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in offered
            ]
            if others:
                raise ParamError(
                    f"loss_constructors: one needs {', '.join(others)}, and evaluate() passes "
                    f"{', '.join(offered)}. Give it a default, or set loss instead."
                )

    def on_rank(self, device: torch.device, **offered: Any) -> RankObjective:
        """Return the objective with its losses on a rank's device. Runs on the rank.

        Parameters
        ----------
        device : torch.device
            The rank's device; loss modules are moved there.
        **offered
            Arguments for loss constructors besides ``device``: model, optimizer, rank, size, spec.

        Raises
        ------
        ParamError
            If a loss from a constructor is unfit, see `check_losses`.
        """
        losses: Sequence[Callable[..., torch.Tensor]] | None = self.losses
        if losses is None and self.loss_constructors is not None:
            offered = {"device": device, **offered}
            losses = [_call_with_known(make, offered) for make in self.loss_constructors]
            self.check_losses(losses, "loss_constructors")
        loss: Loss | JointLoss | None = None
        if losses is not None:
            on_device = [_on_device(loss, device) for loss in losses]
            is_joint, weights = self.joint, self.loss_weights
            loss = JointLoss(on_device[0]) if is_joint else Loss(on_device, weights)
        return RankObjective(self, loss, device)


def _on_device(value: Any, device: torch.device) -> Any:
    """Return a loss with its modules and tensors, also of its ``partial``, on a device.

    Containers are changed in place, because callbacks may refer to them.
    """
    if isinstance(value, torch.nn.Module):
        return value.to(device)
    if isinstance(value, functools.partial):
        function, args, given = _on_device(value.func, device), list(value.args), value.keywords
        _on_device([args, given], device)
        changed: Any = value
        changed.__setstate__((function, tuple(args), given, vars(value)))
    elif type(value) in (list, dict):
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = _on_device(value[key], device)
    # A single number may stay on the CPU.
    is_array = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.to(device) if is_array else value


class RankObjective:
    """Objective with its losses on a rank's device. Runs on the rank, and in the dry run.

    Parameters
    ----------
    given : Objective
        The objective.
    loss : Loss, JointLoss or None
        Its loss; None if ``train_minibatch_fn`` computes its own.
    device : torch.device
        The rank's device.
    """

    def __init__(
        self, given: Objective, loss: Loss | JointLoss | None, device: torch.device
    ) -> None:
        self.tensors = given.tensors
        self.metrics = given.named_metrics
        self.loss = loss
        self._device = device
        self._train_minibatch_fn = given.train_minibatch_fn
        self._class_weight = given.class_weight
        self._step_loss: StepLoss | None = None

    @property
    def has_own_step(self) -> bool:
        """Return whether training must call `run_minibatch`."""
        return self._train_minibatch_fn is not None

    @property
    def users_objects(self) -> dict[str, Any]:
        """User objects that may have state to resume from, by param name."""
        losses = [] if self.loss is None else self.loss.functions
        return {"train_minibatch_fn": self._train_minibatch_fn, "loss": losses}

    @property
    def loss_parts(self) -> int:
        """Number of columns of `Evaluation.counted`."""
        if self.loss is None or self.loss.has_one_denominator:
            return 1
        return len(self.loss.functions)

    def totals(self, window: Sequence[AnyColumns]) -> Callable[[], torch.Tensor] | None:
        """Return the step's denominators that labels determine, summed over all ranks.

        All ranks must call this method once per step. The forward pass hides part of the reduction.

        Parameters
        ----------
        window : sequence of mapping or CollatedBatch
            Columns of this rank's micro-batches of the step.

        Returns
        -------
        callable or None
            Returns one denominator per label; None if none is needed, as for a mean over rows.
        """
        tensors = self.tensors
        loss = self.loss
        if (
            self.has_own_step
            or not isinstance(loss, Loss)
            or not loss.depends_on_targets(tensors.label_dtypes)
        ):
            return None
        zeros = torch.zeros(len(loss.functions), dtype=torch.float64, device=self._device)
        own = [
            loss.denominators(tensors.labels(columns, self._device))
            for columns in window
            # A collated batch without rows has no labels.
            if not isinstance(columns, CollatedBatch) or columns.rows
        ]
        total = torch.stack([zeros, *own]).sum(dim=0)
        if current().size == 1:
            return lambda: total
        return functools.cache(current().reduce_async(total, "sum", "denominators"))

    def evaluate(
        self, module: torch.nn.Module, batch: Batch, weights: StepWeights | None = None
    ) -> Evaluation:
        """Return a batch's evaluation; with ``weights``, including the loss for a backward pass.

        A batch with ``weights`` is one of training, to which class weights apply.
        """
        if weights is not None:
            batch = self.weighted(batch)
        return self.evaluated(self.tensors.call(module, batch.inputs), batch, weights)

    def evaluated(self, raw: Any, batch: Batch, weights: StepWeights | None = None) -> Evaluation:
        """Return the evaluation of what the module returned for a batch; see `evaluate`."""
        outputs, labels = self._predictions(raw, batch.labels)
        given: tuple[Any, Any] = (outputs, labels)
        if isinstance(self.loss, JointLoss):
            given = raw, batch.labels
        parts = self.parts(*given, batch.weights, batch)
        assert self.loss is not None
        is_mean = all(part.kind == "rows" for part in parts)
        step_loss = None
        if weights is not None:
            step_loss = _step_loss(self.loss, parts, weights.of_step(parts), outputs)
        counted = None if is_mean and self.loss_parts == 1 else self.loss.counted(parts)
        return Evaluation(self.loss.mean(parts), outputs, labels, batch.rows, counted, step_loss)

    def run_minibatch(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        batch: Batch,
        weights: StepWeights,
        index: int = 0,
    ) -> Evaluation:
        """Train on a batch with the user's function.

        Parameters
        ----------
        module, optimizer
            Trained module and its optimizer.
        batch : Batch
            At least one row.
        weights : StepWeights
            Weights of the step's losses.
        index : int
            Number of the batch in its epoch.
        """
        loss_fn = StepLoss(self.loss, functools.partial(self.parts, batch=batch), weights)
        self._step_loss = loss_fn
        assert self._train_minibatch_fn is not None
        raw, returned = call_with_leading(
            self._train_minibatch_fn,
            module,
            optimizer,
            self.arranged,
            loss_fn,
            self.tensors.arguments(batch.inputs),
            batch.labels,
            batch.weights,
            weights.passes,
            index,
        )
        outputs, labels = self._predictions(raw, batch.labels)
        if isinstance(returned, Mapping):
            raise ParamError(
                "train_minibatch_fn: expected outputs and a loss, found a dict as the loss. Call "
                "loss_fn.scale(loss, denominator).backward() and optimizer.step() in the function, "
                "and return the loss alone."
            )
        # The user's function may have divided or scaled the returned loss already.
        loss, counted = loss_fn.computed or measured(WeightedLoss(returned, batch.rows))
        return Evaluation(loss.detach(), outputs, labels, batch.rows, counted)

    def weighted(self, batch: Batch) -> Batch:
        """Return a batch of training, to which class weights apply."""
        if not self._class_weight:
            return batch
        weights = class_weights(batch.labels[0], self._class_weight)
        return replace(batch, weights=weights if batch.weights is None else batch.weights * weights)

    def loss_in_step(self, returned: Any) -> Any:
        """Return the contribution to the step, on this rank, of a loss that a closure returned."""
        return returned if self._step_loss is None else self._step_loss.in_step(returned)

    def _predictions(self, raw: Any, labels: Any) -> tuple[Any, Any]:
        """Return predictions and labels for metrics; none if a module returned only its losses."""
        try:
            return self.tensors.align(require_tensors(self.tensors.select(raw), raw), labels)
        except ShapeError:
            takes_all = self.has_own_step or isinstance(self.loss, JointLoss)
            if self.metrics.names != [] or not takes_all:
                raise
            return [], labels

    def arranged(self, raw: Any, labels: Any) -> tuple[Any, Any]:
        """Return outputs and labels in the form that the loss takes."""
        if isinstance(self.loss, JointLoss):
            return raw, labels
        return self.tensors.align(raw, labels)

    def parts(self, outputs: Any, labels: Any, weights: Any, batch: Batch) -> list[WeightedLoss]:
        """Return the loss parts of arranged outputs and labels."""
        if self.loss is None:
            raise ParamError(
                "loss is not set, and train_minibatch_fn calls loss_fn. Set loss, or let "
                "train_minibatch_fn compute its own."
            )
        if isinstance(self.loss, JointLoss):
            inputs = self.tensors.arguments(batch.inputs)
            return self.loss.parts(
                batch.rows, outputs=outputs, labels=labels, inputs=inputs, sample_weights=weights
            )
        return self.loss.parts(outputs, labels, weights)


def class_weights(labels: torch.Tensor, weights: Mapping[int, float]) -> torch.Tensor:
    """Return the class weight of each row; 1 for classes without a weight.

    Parameters
    ----------
    labels : torch.Tensor
        Class numbers, of shape ``(rows,)`` or ``(rows, 1)``, or one-hot rows.
    weights : mapping of int to float
        Class to weight.
    """
    check_rank(labels)
    is_one_hot = labels.dim() > 1 and labels.shape[-1] > 1
    classes = labels.argmax(dim=-1) if is_one_hot else labels.reshape(-1).round().long()
    numbers = torch.tensor(sorted(weights), device=labels.device)
    values = torch.tensor([weights[n] for n in sorted(weights)], device=labels.device)
    positions = torch.searchsorted(numbers, classes).clamp_(max=len(numbers) - 1)
    return torch.where(numbers[positions] == classes, values[positions], 1.0)


def _step_loss(
    loss: LossParts, parts: Sequence[WeightedLoss], factors: Sequence[Any], outputs: Any
) -> torch.Tensor:
    """Return the scaled loss for a backward pass, or a zero if the batch has no weight."""
    if any(part.kind == "stated" and not part.weight > 0 for part in parts):
        # The mean of an empty batch may be NaN, and so may its gradient and a loss in the outputs.
        sums = [output.sum() for output in outputs if output.dim()]
        if not sums:
            raise ParamError(
                "loss: it states that no element of a batch counts, and the model returned no "
                "output with rows beside its loss. Let the model return its predictions, too."
            )
        return 0.0 * torch.stack(sums).sum()
    return loss.scaled(parts, factors)


def _call_with_known(function: Callable[..., Any], offered: dict[str, Any]) -> Any:
    """Call a function with only those offered arguments that it takes."""
    parameters = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**offered)
    return function(**{p.name: offered[p.name] for p in parameters if p.name in offered})
