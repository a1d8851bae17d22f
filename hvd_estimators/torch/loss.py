"""The loss of several labels, with weights of labels and of rows. Used on both sides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError

__all__ = ["Loss", "check_weightable"]

LossFunction = Callable[..., torch.Tensor]


class Loss:
    """The weighted sum of one loss per label: ``sum(loss_weight[i] * mean(loss[i]))``.

    With sample weights each mean is ``sum(w * loss) / rows``, as horovod.spark and Keras have it:
    a row of weight two counts twice, and weights that are all alike scale the loss.

    Parameters
    ----------
    functions : sequence of callable
        ``function(output, label)`` returns the mean over a batch. With sample weights, functions
        are called with ``reduction="none"``, and loss modules get that as their attribute.
    loss_weights : sequence of float
        One weight per label.
    """

    def __init__(self, functions: Sequence[LossFunction], loss_weights: Sequence[float]) -> None:
        self.functions = list(functions)
        self.loss_weights = list(loss_weights)

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss of a batch, a scalar tensor."""
        terms = [
            weight * _mean(function, output, label, sample_weights)
            for function, weight, output, label in zip(
                self.functions, self.loss_weights, outputs, labels, strict=True
            )
        ]
        return torch.stack([term.reshape(()) for term in terms]).sum()


def _mean(
    function: LossFunction,
    output: torch.Tensor,
    label: torch.Tensor,
    sample_weights: torch.Tensor | None,
) -> torch.Tensor:
    if sample_weights is None:
        return function(output, label)
    elements = _unreduced(function, output, label)
    rows = elements.reshape(len(sample_weights), -1).mean(dim=1)
    return (rows * sample_weights).mean()


def _unreduced(function: LossFunction, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    if isinstance(function, torch.nn.Module) and hasattr(function, "reduction"):
        module: Any = function
        reduction, module.reduction = module.reduction, "none"
        try:
            elements: torch.Tensor = function(output, label)
        finally:
            module.reduction = reduction
        return elements
    return function(output, label, reduction="none")


def check_weightable(functions: Sequence[Callable[..., Any]], param: str = "loss") -> None:
    """Make sure that losses can be computed row by row, for sample weights.

    Raises
    ------
    ParamError
        If a loss has no ``reduction`` argument or attribute.
    """
    for function in functions:
        if isinstance(function, torch.nn.Module):
            if hasattr(function, "reduction"):
                continue
        elif _takes_reduction(function):
            continue
        raise ParamError(
            f"{param}: {function!r} cannot be weighted by sample_weight_col. Expected a function "
            "that takes reduction='none' (such as torch.nn.functional.mse_loss), or a module with "
            "a reduction attribute (such as torch.nn.MSELoss())."
        )


def _takes_reduction(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Built-in functions have no signature; the dry run tells.
        return True
    return "reduction" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
