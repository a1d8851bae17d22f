"""Denominators that users' functions state: summed over ranks, applied to averaged gradients.

A batch's gradient is multiplied by its denominator before the backward pass. The step's gradient
is divided by the sum of all denominators when it has been averaged, since a later micro-batch or
another rank may still add to this sum. Runs on the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_estimators.torch.ranks import sum_over_ranks, sum_tensor

__all__ = ["StatedDenominators"]


class StatedDenominators:
    """The denominators of a step's batches, over all ranks.

    Whether losses state one is agreed upon once, in the first step, as a rank may have no rows in
    a step and still has to take part.

    Attributes
    ----------
    ratio : torch.Tensor or float
        The number by which the newest gradients were multiplied.
    """

    def __init__(self) -> None:
        self._agreed: bool | None = None
        self._own: torch.Tensor | None = None
        self._plain = False
        self.ratio: torch.Tensor | float = 1.0

    def add(self, denominator: Any, weight: float) -> None:
        """Add a batch.

        Parameters
        ----------
        denominator : torch.Tensor, float or None
            The number that the batch's mean was divided by; None for a plain mean.
        weight : float
            The number by which the batch counted when its loss was scaled, such as its rows.

        Raises
        ------
        RuntimeError
            If some batches state a denominator and others do not.
        """
        if denominator is None:
            self._plain = True
        else:
            stated = torch.as_tensor(denominator, dtype=torch.float64)
            own = torch.stack([stated, torch.full_like(stated, weight)])
            self._own = own if self._own is None else self._own + own
        is_stated = self._own is not None
        if (is_stated and self._agreed is False) or (self._plain and (is_stated or self._agreed)):
            raise RuntimeError(
                "A loss stated a denominator in some batches and none in others. Return "
                "{'loss': ..., 'denominator': ...} for every batch, or for none."
            )

    def divide(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the averaged gradients of a step. Called by all ranks."""
        if self._agreed is None:
            self._agreed = sum_over_ranks(self._own is not None, "states_denominators") > 0
        own_sums, self._own, self._plain = self._own, None, False
        if not self._agreed:
            return
        trained = [p for p in parameters if p.grad is not None]
        if own_sums is None:
            own_sums = torch.zeros(2, dtype=torch.float64)
        if trained:
            own_sums = own_sums.to(trained[0].device)
        denominator, weight = sum_tensor(own_sums, "stated_denominators")
        ratio = torch.where(denominator > 0, weight / denominator, 0.0)
        # No rank has added a batch since: the gradients are divided already.
        ratio = self.ratio = torch.where(weight > 0, ratio, 1.0)
        with torch.no_grad():
            for parameter in trained:
                gradient: Any = parameter.grad
                if gradient.is_sparse:
                    parameter.grad = gradient * ratio.to(gradient.dtype)
                else:
                    gradient.mul_(ratio)
