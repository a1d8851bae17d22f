"""Losses of outputs and labels, each a mean with a weight.

`hvd_estimators.torch.loss_weights` says what multiplies them.

Runs on the driver and on the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hvd_estimators.exceptions import ParamError
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.inference.classification import of_labels
from hvd_estimators.torch.loss_weights import LossParts, WeightedLoss, as_stated

LossFunction = Callable[..., Any]


@dataclass(frozen=True)
class _Reduction:
    """Reduction of a batch's rows in a loss function.

    Attributes
    ----------
    kind : str
        ``"rows"`` (mean over rows), ``"batchmean"`` (sum within each row, mean over rows),
        ``"targets"`` (mean over the class indices that are not ignored), or ``"sum"``.
    weight : torch.Tensor or None
        Weight of each class.
    ignore_index : int
        Class index that is ignored.
    """

    kind: str
    weight: torch.Tensor | None = None
    ignore_index: int = -100

    def of_label(self, label: torch.Tensor) -> str:
        """Return the kind for labels of this dtype."""
        # Labels that are class probabilities: a mean over rows.
        by_index = self.kind == "targets" and not label.is_floating_point()
        return self.kind if by_index or self.kind != "targets" else "rows"

    def denominator(self, label: torch.Tensor) -> torch.Tensor:
        """Return the denominator of a batch, computed from its class indices."""
        counts = label != self.ignore_index
        if self.weight is None:
            return counts.sum().double()
        weight = self.weight.to(label.device).double()
        # torch takes an index of bytes as a mask.
        return (weight[torch.where(counts, label, 0).long()] * counts).sum()


def _positive(denominator: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a denominator in a tensor's dtype, with 0 replaced by 1."""
    given = torch.as_tensor(denominator, dtype=like.dtype, device=like.device)
    return torch.where(given > 0, given, 1.0)


@dataclass(frozen=True)
class Evaluation:
    """Results of a model for a batch.

    Attributes
    ----------
    loss : torch.Tensor
        Loss of the batch alone, sample weights included; a scalar.
    outputs, labels : list of torch.Tensor
        One per label, in the shapes in which metrics compare them. If one loss takes all outputs
        and labels, their numbers may differ.
    rows : int
        Rows of the batch.
    counted : torch.Tensor or None
        Numerators and denominators of the loss, see `Loss.counted`. None if ``loss`` is a mean over
        rows.
    step_loss : torch.Tensor or None
        Loss for the backward pass, see `StepWeights`; None if the caller runs no backward pass.
    """

    loss: torch.Tensor
    outputs: Sequence[torch.Tensor]
    labels: Sequence[torch.Tensor]
    rows: int
    counted: torch.Tensor | None = None
    step_loss: torch.Tensor | None = None

    def numerators(self) -> torch.Tensor:
        """Return `counted`: numerators and denominators, also if ``loss`` is a mean over rows."""
        if self.counted is not None:
            return self.counted
        return WeightedLoss(self.loss, self.rows).counted()[:, None]


class Loss(LossParts):
    """Weighted sum of one loss per label: ``sum(loss_weight[i] * loss[i])``.

    Each loss is a numerator over a denominator. The denominator is:

    - the number of rows, for a mean over rows;
    - the sum of the classes' weights without ignored indices, for cross entropy of class indices;
    - 1, for ``reduction="sum"``;
    - the stated number, for a function that returns ``{"loss": ..., "denominator": ...}``.

    Sample weights multiply the numerator only. A row of weight two counts twice, and equal weights
    scale the loss.

    Parameters
    ----------
    functions : sequence of callable
        ``function(output, label)`` returns the loss of a batch. With sample weights, functions are
        called with ``reduction="none"``; loss modules get this value as their attribute.
    loss_weights : sequence of float
        One weight per label.
    """

    def __init__(self, functions: Sequence[LossFunction], loss_weights: Sequence[float]) -> None:
        super().__init__(loss_weights)
        self.functions = list(functions)
        self._reductions = [_reduction(function) for function in self.functions]

    def __call__(
        self,
        outputs: Sequence[torch.Tensor] | torch.Tensor,
        labels: Sequence[torch.Tensor] | torch.Tensor,
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of a batch as a scalar tensor."""
        return self.mean(self.parts(outputs, labels, sample_weights))

    def parts(
        self,
        outputs: Sequence[torch.Tensor] | torch.Tensor,
        labels: Sequence[torch.Tensor] | torch.Tensor,
        sample_weights: torch.Tensor | None = None,
    ) -> list[WeightedLoss]:
        """Return the loss of each label for a batch; a bare tensor counts as a list of one."""
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        labels = [labels] if isinstance(labels, torch.Tensor) else labels
        parts = [
            _part(*each, sample_weights)
            for each in zip(self.functions, self._reductions, outputs, labels, strict=True)
        ]
        if len(parts) > 1 and any(part.kind == "stated" for part in parts):
            raise ParamError(
                "loss: a function that returns a denominator must be the only loss, found "
                f"{len(parts)} labels. Their gradients are divided by one number."
            )
        return parts

    @property
    def has_one_denominator(self) -> bool:
        """Return whether all labels' losses are divided by the same number."""
        return len(self.functions) == 1 or all(
            r.kind in ("rows", "batchmean") for r in self._reductions
        )

    def depends_on_targets(self, dtypes: Sequence[torch.dtype]) -> bool:
        """Return whether label values of these dtypes determine a denominator."""
        pairs = zip(self._reductions, dtypes, strict=True)
        return any(r.kind == "targets" and not dtype.is_floating_point for r, dtype in pairs)

    def denominators(self, labels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return each label's denominator in float64; 0 if label values do not determine it."""
        zero = labels[0].new_zeros((), dtype=torch.float64)
        return torch.stack(
            [
                r.denominator(label) if r.of_label(label) == "targets" else zero
                for r, label in zip(self._reductions, labels, strict=True)
            ]
        )


# Losses of newer versions of torch than the oldest supported one.
_NEWER = ((torch.nn, "LinearCrossEntropyLoss"), (functional, "linear_cross_entropy"))

_OF_CLASS_INDICES = (
    *(torch.nn.CrossEntropyLoss, torch.nn.NLLLoss, functional.cross_entropy, functional.nll_loss),
    *(getattr(module, name) for module, name in _NEWER if hasattr(module, name)),
)


# Value of ``outputs_are`` for each loss of torch that determines it.
_OF_CLASSES = {
    **dict.fromkeys((torch.nn.CrossEntropyLoss, functional.cross_entropy), "logits"),
    **dict.fromkeys((torch.nn.NLLLoss, functional.nll_loss), "log_probabilities"),
}
_OF_ONE_SCORE = {
    torch.nn.BCEWithLogitsLoss: "logits",
    functional.binary_cross_entropy_with_logits: "logits",
    torch.nn.MultiLabelSoftMarginLoss: "logits",
    functional.multilabel_soft_margin_loss: "logits",
    torch.nn.BCELoss: "probabilities",
    functional.binary_cross_entropy: "probabilities",
}
_OF_NUMBERS = (
    *(torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
)


def takes_class_indices(function: LossFunction) -> bool:
    """Return whether a loss of torch takes class indices as labels."""
    return _in_torch(function) in _OF_CLASS_INDICES


def is_mean_of_elements(function: LossFunction) -> bool:
    """Return whether a loss of torch is a mean over all elements of a batch."""
    is_mean = _options_of(function)[1].get("reduction") in (None, "mean")
    return is_mean and _in_torch(function) in (*_OF_NUMBERS, *_OF_ONE_SCORE)


def ignored_class(function: LossFunction) -> int:
    """Return the class index that a loss of class indices ignores."""
    ignored = _options_of(function)[1].get("ignore_index")
    return -100 if ignored is None else int(ignored)


def kind_of_outputs(function: LossFunction, shape: tuple[int | None, ...] | None) -> str | None:
    """Infer ``outputs_are`` from a torch loss.

    Parameters
    ----------
    function : callable
        The loss.
    shape : tuple of int or None
        Shape of a row of the output, or None if it is not known yet.

    Returns
    -------
    str or None
        None if the loss does not determine it.
    """
    known: Any = _in_torch(function)
    if known in _OF_CLASSES:
        return _OF_CLASSES[known] if shape is None or len(shape) == 1 else None
    is_one_number = shape is not None and is_scalar(shape)
    if known in _OF_ONE_SCORE and (shape is None or is_one_number):
        return _OF_ONE_SCORE[known]
    if known in _OF_ONE_SCORE and shape is not None and len(shape) == 1:
        return of_labels(_OF_ONE_SCORE[known])
    return "values" if known in _OF_NUMBERS and is_one_number else None


def _in_torch(function: LossFunction) -> Any:
    """Return torch's class or function that computes a loss, or None for other losses."""
    while isinstance(function, functools.partial):
        function = function.func
    known: tuple[Any, ...] = (*_OF_CLASS_INDICES, *_OF_ONE_SCORE, *_OF_NUMBERS)
    if not isinstance(function, torch.nn.Module):
        return next((entry for entry in known if entry is function), None)
    forward = type(function).forward
    modules: list[Any] = [entry for entry in known if isinstance(entry, type)]
    return next((entry for entry in modules if entry.forward is forward), None)


def _options_of(function: LossFunction) -> tuple[Any, dict[str, Any]]:
    """Return a loss without its ``functools.partial``, and its options."""
    if isinstance(function, torch.nn.Module):
        options = vars(function) | dict(function.named_buffers(recurse=False))
        if not type(function).__module__.startswith("torch.") and not takes_class_indices(function):
            # A user's module may use these attributes in its own way, except for reduction="sum".
            is_sum_of_rows = getattr(function, "reduction", None) == "sum"
            options = {"reduction": "sum"} if is_sum_of_rows else {}
        return function, options
    options = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    return function, options


def is_sum(function: LossFunction) -> bool:
    """Return whether a loss has ``reduction="sum"``, as an attribute or by `functools.partial`."""
    return _options_of(function)[1].get("reduction") == "sum"


def _reduction(function: LossFunction) -> _Reduction:
    """Return the reduction of a loss function; unknown functions count as a mean over rows."""
    by_targets = takes_class_indices(function)
    _, options = _options_of(function)
    if options.get("reduction") in ("sum", "batchmean"):
        return _Reduction(options["reduction"])
    if not by_targets:
        return _Reduction("rows")
    return _Reduction("targets", options.get("weight"), ignored_class(function))


def _part(
    function: LossFunction,
    reduction: _Reduction,
    output: torch.Tensor,
    label: torch.Tensor,
    sample_weights: torch.Tensor | None,
) -> WeightedLoss:
    kind = reduction.of_label(label)
    if sample_weights is None:
        loss = _with_reduction(function, output, label, "sum" if kind == "targets" else None)
    else:
        loss = _with_reduction(function, output, label, "none")
    value, stated = as_stated(loss, "loss")
    if sample_weights is not None:
        elements = value.reshape(len(sample_weights), -1)
        is_mean = kind == "rows" and stated is None
        of_rows = elements.mean(dim=1) if is_mean else elements.sum(dim=1)
        weighted = of_rows * sample_weights
        value = weighted.mean() if kind in ("rows", "batchmean") else weighted.sum()
        if stated is not None:
            value = weighted.sum() / _positive(stated, value)
    if stated is not None:
        return WeightedLoss(value, stated, "stated")
    if kind == "targets":
        weight = reduction.denominator(label)
        return WeightedLoss(value / _positive(weight, value), weight, kind)
    return WeightedLoss(value, 0.0, "sum") if kind == "sum" else WeightedLoss(value, len(label))


def _with_reduction(
    function: LossFunction, output: torch.Tensor, label: torch.Tensor, reduction: str | None
) -> Any:
    if reduction is None:
        return function(output, label)
    if isinstance(function, torch.nn.Module) and hasattr(function, "reduction"):
        module: Any = function
        before, module.reduction = module.reduction, reduction
        try:
            return function(output, label)
        finally:
            module.reduction = before
    try:
        return function(output, label, reduction=reduction)
    except TypeError as error:
        raise ParamError(
            f"loss: {function!r} cannot be weighted by row ({error}). "
            "Expected a function that takes reduction='none' (such as "
            "torch.nn.functional.mse_loss), or a module with a reduction attribute (such as "
            "torch.nn.MSELoss())."
        ) from error
