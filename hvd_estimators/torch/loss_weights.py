"""The weight of each loss in a step: the number that multiplies a loss before its backward pass.

A step's loss is ``sum(mean * weight) / sum(weight)``, over all ranks and over the micro-batches of
the step. Optimizers, clipping and gradient scalers get the gradient of it. The mean of the ranks'
gradients gives the sum, so a loss is multiplied by ``ranks * passes * weight / sum(weight)``:

- ``rows``: a mean over rows. The plan knows the sum, see `WeightedBatches`.
- ``targets``: a mean over class indices. Ranks add up the weights of the step's labels beforehand.
- ``stated``: the user's function states the weight. The rows take the place of the sum, until the
  last micro-batch knows it. Then gradients and loss are multiplied once by ``rows / sum(weight)``.
- ``sum``: not divided, so the factor is ``ranks * passes``.

Each loss is also divided by ``passes``, by the estimator or by a user's ``train_minibatch_fn``.
Runs on the driver and on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.collectives import sum_tensor

_FINAL, _NO_LOSS = -1, -2
"""Owners of the parameters' gradients: all finished losses together, and the previous step."""


@dataclass(frozen=True)
class WeightedLoss:
    """Loss of a batch, and the weight of the batch in the step's loss.

    Attributes
    ----------
    value : torch.Tensor
        The mean over the batch, or the sum for the kind ``"sum"``.
    weight : torch.Tensor or float
        Weight of the mean; 0 for the kind ``"sum"``.
    kind : str
        ``"rows"``, ``"targets"``, ``"stated"`` or ``"sum"``, see the module's description.
    """

    value: torch.Tensor
    weight: Any
    kind: str = "rows"

    @property
    def mean(self) -> torch.Tensor:
        """Loss of this batch alone; 0 if the stated weight is 0, even if the value is NaN."""
        if self.kind != "stated":
            return self.value
        counts = torch.as_tensor(self.weight, device=self.value.device) > 0
        return torch.where(counts, self.value, 0.0)

    def counted(self, coefficient: float = 1.0) -> torch.Tensor:
        """Return numerator and weight in float64, to add up the loss of an epoch."""
        with torch.no_grad():
            mean = self.mean.detach().reshape(()).double() * coefficient
            weight = torch.as_tensor(self.weight, dtype=torch.float64, device=mean.device)
            return torch.stack([mean if self.kind == "sum" else mean * weight, weight])


class StepWeights:
    """Weights of a step's losses on a rank.

    A micro-batch may have several losses with different weights. Their gradients of earlier
    micro-batches are then kept apart, by the position of the call.

    Parameters
    ----------
    parameters : callable
        Returns the trained parameters.
    backward_passes : callable
        Returns a number that each backward pass increases.

    Attributes
    ----------
    rows : int
        Rows of the current micro-batch.
    passes : int
        Micro-batches of a step on this rank.
    is_last : bool
        Whether the current micro-batch is the last one of its step on this rank.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.Tensor]] = tuple,
        backward_passes: Callable[[], int] = int,
    ) -> None:
        self._parameters = parameters
        self._backward_passes = backward_passes
        self._are_stated: bool | None = None
        # Sums of weights and rows of earlier micro-batches, by call.
        self._open: dict[int, torch.Tensor] = {}
        # Gradients that the parameters do not hold now, by call.
        self._apart: dict[int, dict[torch.Tensor, torch.Tensor]] = {}
        self._owner = _NO_LOSS
        self.is_last = True
        self.start(1)

    def start(
        self,
        rows: int,
        factor: float = 1.0,
        *,
        ranks: int = 1,
        passes: int = 1,
        totals: Callable[[], torch.Tensor] | None = None,
        is_last: bool = True,
    ) -> None:
        """Start a micro-batch.

        Parameters
        ----------
        rows : int
            Rows of the micro-batch.
        factor : float
            ``ranks * passes * rows / sum(rows)``, see `WeightedBatches`.
        ranks, passes : int
            Number of ranks, and of micro-batches of a step on each.
        totals : callable, optional
            Returns the step's sum of weights for each label, if labels determine it.
        is_last : bool
            Whether the micro-batch is the last one of its step on this rank.
        """
        if self.is_last and not self._open:  # The previous step is over.
            self._owner = _NO_LOSS
        self.rows, self.passes, self.is_last = rows, passes, is_last
        self._factor, self._slots, self._totals = factor, ranks * passes, totals
        self._calls = 0
        self._before: tuple[int, Any] = (-1, 1.0)

    def of_step(self, losses: Sequence[WeightedLoss]) -> list[Any]:
        """Return the factors of a micro-batch's losses, whose backward pass the estimator runs.

        Raises
        ------
        RuntimeError
            If some batches state a weight and others do not.
        """
        stated = next((loss.weight for loss in losses if loss.kind == "stated"), None)
        ratio = self._step_ratio(stated)
        return [factor / self.passes for factor in self._factors(losses, lambda _: ratio)]

    def of_call(self, losses: Sequence[WeightedLoss]) -> list[Any]:
        """Return the factors of losses within the user's step. All ranks must call equally often.

        Raises
        ------
        ParamError
            If one backward pass follows two losses with different weights, whose gradients
            then cannot be divided separately.
        """
        return self._factors(losses, self._call_ratio)

    def of_batch(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the factor of a mean if each batch counts as one; all ranks must call it equally.

        Plain Lightning's accumulation counts so, and a module that steps by itself.
        """
        (total,) = sum_tensor(weight.reshape(1), "denominators")
        return torch.where(total > 0, weight * (self._slots / total), 0.0)

    def without_rows(self) -> None:
        """Take part in a micro-batch in which this rank has no rows."""
        self._step_ratio(None)

    def before_step(self) -> None:
        """Divide the gradients that wait for further micro-batches, if an optimizer steps now."""
        if not self.is_last:
            for call in sorted(self._open):
                self._close(call, torch.zeros_like(self._open[call]))

    def stepped(self) -> None:
        """Note that an optimizer has used the gradients."""
        if not self._open:
            self._owner = _NO_LOSS

    def _factors(self, losses: Sequence[WeightedLoss], ratio_of: Callable[[Any], Any]) -> list[Any]:
        totals = [None] * len(losses) if self._totals is None else list(self._totals())
        factors: list[Any] = []
        for loss, total in zip(losses, totals, strict=True):
            if loss.kind == "rows":
                factors.append(self._factor * ratio_of(None))
            elif loss.kind == "sum":
                factors.append(self._slots if self.rows else 0.0)
            elif total is not None and loss.kind == "targets":
                share = loss.weight * self._slots / total
                factors.append(torch.where(total > 0, share, 0.0))
            else:
                per_row = self._factor / max(self.rows, 1)
                factors.append(loss.weight * per_row * ratio_of(loss.weight))
        return factors

    def _step_ratio(self, stated: Any) -> Any:
        """Return the ratio of rows and weights for the only loss of a micro-batch.

        In the first step, the ranks agree once whether losses state weights, because a rank without
        rows does not know.
        """
        is_stated = stated is not None or 0 in self._open
        is_plain = stated is None and self.rows > 0
        before = self._are_stated
        if (is_stated and (is_plain or before is False)) or (is_plain and before):
            raise RuntimeError(
                "A loss stated a denominator in some batches and none in others. Return "
                "{'loss': ..., 'denominator': ...} for every batch, or for none."
            )
        if self.is_last and self._are_stated is None:
            own = torch.tensor([float(is_stated)], dtype=torch.float64)
            self._are_stated = sum_tensor(own, "states_denominators").item() > 0
        if stated is None and not (self.is_last and self._are_stated):
            return 1.0
        return self._call_ratio(0.0 if stated is None else stated)

    def _call_ratio(self, weight: Any) -> Any:
        """Return rows / weights of all micro-batches and ranks, for the next loss of this one.

        The ratio is 1 before the last micro-batch, and for a mean over rows (None).
        """
        call, self._calls = self._calls, self._calls + 1
        is_open, ratio = bool(self._open), 1.0
        if weight is None:
            self._give_gradients_to(_FINAL)
        else:
            weight = torch.as_tensor(weight, dtype=torch.float64)
            own = torch.stack([weight, torch.full_like(weight, self.rows)])
            # The same device on all ranks.
            own = own.to(next((p.device for p in self._parameters()), own.device))
            if not self.is_last:
                self._give_gradients_to(call)
                self._open[call] = own + self._open[call] if call in self._open else own
                return 1.0
            is_open, ratio = call in self._open, self._close(call, own)
        passes, before = self._before
        self._before = self._backward_passes(), ratio
        if is_open and passes == self._backward_passes() and float(before) != float(ratio):
            raise ParamError(
                "train_minibatch_fn: with backward_passes_per_step, call backward() on each scaled "
                "loss before the next loss_fn.scale(), because the losses are divided by different "
                "numbers. Or set backward_passes_per_step=1."
            )
        return ratio

    def _close(self, call: int, own: torch.Tensor) -> Any:
        """Return a loss's ratio, and multiply its gradients of earlier micro-batches by it."""
        earlier = self._open.pop(call, None)
        weight, rows = sum_tensor(own if earlier is None else own + earlier, "denominators")
        ratio = torch.where(weight > 0, rows / weight, 0.0)
        if earlier is None:
            self._give_gradients_to(_FINAL)
            return ratio
        self._give_gradients_to(call)
        final = self._apart.pop(_FINAL, {})
        with torch.no_grad():
            for parameter in self._parameters():
                _multiply_and_add(parameter, ratio, final.get(parameter))
        self._owner = _FINAL
        return ratio

    def _give_gradients_to(self, call: int) -> None:
        """Let the parameters hold the gradients of one loss; keep the others apart."""
        if self._owner not in (call, _NO_LOSS):
            own = self._apart.pop(call, {})
            apart = self._apart.setdefault(self._owner, {})
            for parameter in self._parameters():
                if parameter.grad is not None:
                    apart[parameter] = parameter.grad
                parameter.grad = own.get(parameter)
        self._owner = call


def _multiply_and_add(
    parameter: torch.Tensor, factor: torch.Tensor, other: torch.Tensor | None
) -> None:
    gradient: Any = parameter.grad
    if gradient is not None and gradient.is_sparse:
        gradient = gradient * factor.to(gradient.dtype)
    elif gradient is not None:
        gradient.mul_(factor)
    if other is not None:
        gradient = other if gradient is None else gradient + other
    parameter.grad = gradient
