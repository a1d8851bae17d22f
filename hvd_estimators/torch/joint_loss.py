"""A loss of all outputs and labels at once. Used on both sides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.loss import LossPart, LossParts, as_stated

__all__ = ["LOSS_FORMS", "JointLoss", "check_joint"]

LOSS_FORMS = ("per_label", "joint")
"""One loss per output and label, or a single one that takes everything."""

_OFFERED = ("outputs", "labels", "inputs", "sample_weights")


class JointLoss(LossParts):
    """One loss of everything, such as a variational autoencoder's.

    Parameters
    ----------
    function : callable
        Called by keyword with those of ``outputs`` (what the module returned), ``labels`` (a list
        with a tensor per label column), ``inputs`` (what the module was called with: a list, or a
        dict if ``input_form`` has names) and ``sample_weights`` that it takes. Returns the mean
        over a batch, or ``{"loss": ..., "denominator": ...}`` for a mean over something else.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__([1.0])
        self.functions = [function]

    def __call__(self, **offered: Any) -> torch.Tensor:
        """Return the loss of a batch, a scalar tensor."""
        (part,) = self.parts(0, **offered)
        return part.mean

    def parts(self, rows: int, **offered: Any) -> list[LossPart]:
        """Return the loss of a batch of so many rows as one part."""
        function = self.functions[0]
        parameters = _parameters(function)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            names = {p.name for p in parameters}
            offered = {name: value for name, value in offered.items() if name in names}
        value, stated = as_stated(function(**offered), "loss")
        if stated is not None:
            return [LossPart("stated", value, stated)]
        return [LossPart("rows", value, rows)]


def check_joint(function: Callable[..., Any], weighted: bool, param: str = "loss") -> None:
    """Make sure that a joint loss can be called by the names of what it is offered.

    Parameters
    ----------
    function : callable
        The loss.
    weighted : bool
        Whether rows have sample weights.
    param : str
        The param that holds the loss, for messages.

    Raises
    ------
    ParamError
        If it needs something else, or there are sample weights that it does not take.
    """
    try:
        parameters = _parameters(function)
    except (TypeError, ValueError):  # built-in functions have no signature
        parameters = []
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    unknown = [
        p
        for p in named
        if p.kind is p.POSITIONAL_ONLY or (p.default is p.empty and p.name not in _OFFERED)
    ]
    found = ", ".join(p.name for p in named) or "no names"
    if unknown or not (takes_all or any(p.name in _OFFERED for p in named)):
        raise ParamError(
            f"{param}: a joint loss (loss_form='joint') is called by keyword with those of "
            f"{', '.join(_OFFERED)} that it takes, found {found}. Wrap it, such as "
            "lambda outputs, labels: my_loss(outputs[0], labels[0], outputs[1])."
        )
    if weighted and not (takes_all or any(p.name == "sample_weights" for p in named)):
        raise ParamError(
            f"{param}: sample_weight_col is set, and the joint loss takes no sample_weights, found "
            f"{found}. Let it take sample_weights and return (sample_weights * losses).mean(), or "
            "leave sample_weight_col out."
        )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    # The signature of a module is that of any module.
    called = function.forward if isinstance(function, torch.nn.Module) else function
    return list(inspect.signature(called).parameters.values())
