"""The rule that says what multiplies a loss before its backward pass, for torch and Lightning.

A step's loss is ``sum(mean * weight) / sum(weight)``, over all ranks and over the micro-batches of
the step. Optimizers, clipping and gradient scalers get the gradient of it. The mean of the ranks'
gradients gives the sum, so a loss is multiplied by ``ranks * passes * weight / sum(weight)``:

- ``rows``: a mean over rows. The plan knows the sum, see `StepBatches`.
- ``targets``: a mean over class indices. Ranks add up the weights of the step's labels beforehand.
- ``stated``: the user's function states the weight. The rows take the place of the sum, until the
  last micro-batch knows it. Then gradients and loss are multiplied once by ``rows / sum(weight)``.
- ``sum``: not divided, so the factor is ``ranks * passes``.

Each loss is also divided by ``passes``: by the estimator's trainer, by Lightning, or by a user's
``train_minibatch_fn``. With several labels, each loss has a coefficient, see `LossParts`. Weights
of rows and classes are part of the mean, see `hvd_estimators.torch.loss`.
`StepWeights` has the factors of losses that the estimator computes. `StepLoss` is the ``loss_fn``
of a ``train_minibatch_fn``. Runs on the ranks, and in trials on the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.data.arrays import num_rows
from hvd_estimators.exceptions import ParamError
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.torch.collectives import sum_tensor


def as_stated(value: Any, source: str) -> tuple[Any, Any]:
    """Split a loss value into the loss and its stated denominator, None for a plain loss.

    Raises
    ------
    ParamError
        If a dict with a denominator lacks the loss, or one of the two has the wrong type.
    """
    if not isinstance(value, Mapping) or "denominator" not in value:
        return value, None
    loss, denominator = value.get("loss"), value["denominator"]
    if not isinstance(loss, torch.Tensor) or not isinstance(
        denominator, (int, float, torch.Tensor)
    ):
        raise ParamError(
            f"{source}: expected {{'loss': tensor, 'denominator': number}}, found "
            f"{ {name: type(part).__name__ for name, part in value.items()} }."
        )
    if isinstance(denominator, torch.Tensor):
        denominator = denominator.detach().reshape(()).double()
    return loss, denominator


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


class LossParts:
    """Sum of losses, each a mean over a batch.

    Parameters
    ----------
    loss_weights : sequence of float
        One coefficient per part.
    """

    def __init__(self, loss_weights: Sequence[float]) -> None:
        self.loss_weights = list(loss_weights)

    @property
    def has_one_denominator(self) -> bool:
        """Return whether all parts are divided by the same number."""
        return len(self.loss_weights) == 1

    def mean(self, parts: Sequence[WeightedLoss]) -> torch.Tensor:
        """Return the loss of one batch alone."""
        return self._summed([part.mean for part in parts])

    def scaled(self, parts: Sequence[WeightedLoss], factors: Sequence[Any]) -> torch.Tensor:
        """Return the loss for a backward pass, given the factor of each label's loss."""
        if all(part.kind == "rows" for part in parts):
            loss = self.mean(parts)
            return loss if factors[0] == 1.0 else loss * factors[0]
        return self._summed([p.value * f for p, f in zip(parts, factors, strict=True)])

    def counted(self, parts: Sequence[WeightedLoss]) -> torch.Tensor:
        """Return numerators and denominators in float64, for summing the loss of an epoch.

        The shape is ``(2, 1)`` if all labels share a denominator, and ``(2, labels)`` otherwise. A
        sum has the denominator 0.
        """
        if self.has_one_denominator and len(parts) > 1:
            return WeightedLoss(self.mean(parts), parts[0].weight).counted()[:, None]
        pairs = zip(parts, self.loss_weights, strict=True)
        return torch.stack([part.counted(coefficient) for part, coefficient in pairs], dim=1)

    def _summed(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        terms = [
            _as_scalar(value if weight == 1.0 else weight * value)
            for weight, value in zip(self.loss_weights, values, strict=True)
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _as_scalar(value: Any) -> torch.Tensor:
    is_tensor = isinstance(value, torch.Tensor)
    if not is_tensor or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if is_tensor else f"{value!r:.80}"
        raise ParamError(
            f"loss: expected one number per batch, found {found}. Return a mean over rows, such as "
            "losses.mean()."
        )
    scalar: torch.Tensor = value if value.dim() == 0 else value.reshape(())
    return scalar


class StepBatches:
    """Training batches of a rank, and the rows of each step over all ranks.

    Parameters
    ----------
    batches : iterator of mapping or CollatedBatch
        The rank's batches.
    global_sizes : iterator of int, or None
        Rows of each batch over all ranks, see `DataModule.global_train_sizes`.
    sum_over_ranks : callable
        Sums one number per rank, exactly in 64 bits. All ranks call it in the same steps, and only
        if a user's data module does not provide ``global_sizes``.
    """

    def __init__(
        self,
        batches: Iterator[Mapping[str, Any] | CollatedBatch],
        global_sizes: Iterator[int] | None,
        sum_over_ranks: Callable[[float], float],
    ) -> None:
        self._batches = batches
        self._sizes = global_sizes
        self._sum_over_ranks = sum_over_ranks

    def next_step(self, count: int) -> tuple[list[Any], float]:
        """Return this rank's next micro-batches, and their rows over all ranks."""
        batches = list(itertools.islice(self._batches, count))
        if self._sizes is not None:
            return batches, float(sum(itertools.islice(self._sizes, count)))
        return batches, self._sum_over_ranks(float(sum(map(rows_of, batches))))


def rows_of(batch: Mapping[str, Any] | CollatedBatch) -> int:
    """Return the number of rows of a batch."""
    return batch.rows if isinstance(batch, CollatedBatch) else num_rows(batch)


class StepWeights:
    """Weights of a step's losses on a rank.

    Parameters
    ----------
    parameters : callable
        Returns the trained parameters.

    Attributes
    ----------
    rows : int
        Rows of the current micro-batch.
    passes : int
        Micro-batches of a step on this rank.
    is_last : bool
        Whether the current micro-batch is the last one of its step on this rank.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self._parameters = parameters
        self._are_stated: bool | None = None
        # Sums of weights and rows of earlier micro-batches of the step, whose weights are stated.
        self._earlier: torch.Tensor | None = None
        self.start(1, 1)

    def start(
        self,
        rows: int,
        step_rows: float,
        passes: int = 1,
        *,
        ranks: int = 1,
        totals: Callable[[], torch.Tensor] | None = None,
        is_last: bool = True,
    ) -> None:
        """Start a micro-batch.

        Parameters
        ----------
        rows : int
            Rows of the micro-batch.
        step_rows : float
            Rows of the step's micro-batches on all ranks.
        passes : int
            Micro-batches of a step on each rank.
        ranks : int
            Number of ranks.
        totals : callable, optional
            Returns the step's sum of weights for each label, if labels determine it.
        is_last : bool
            Whether the micro-batch is the last one of its step on this rank.
        """
        self.rows, self.passes, self.is_last = rows, passes, is_last
        self._micro_batches, self._totals = ranks * passes, totals
        self._per_row = self._micro_batches / step_rows if step_rows else 0.0
        self._losses = self._weighted = 0

    def of_step(self, losses: Sequence[WeightedLoss]) -> list[Any]:
        """Return the factors of a micro-batch's losses, whose backward pass the estimator runs.

        Raises
        ------
        RuntimeError
            If some batches state a weight and others do not.
        """
        stated = next((loss.weight for loss in losses if loss.kind == "stated"), None)
        self._agree(stated)
        return self._factors(losses)

    def of_call(self, losses: Sequence[WeightedLoss]) -> list[Any]:
        """Return the factors of losses within the user's step. All ranks must call equally often.

        Raises
        ------
        ParamError
            If losses with different weights accumulate: their gradients are one sum, which cannot
            be divided by several numbers.
        """
        self._losses += len(losses)
        self._weighted += sum(loss.kind in ("targets", "stated") for loss in losses)
        is_mixed = self._losses > 1 and self._weighted
        if self.passes > 1 and (is_mixed or (self._earlier is not None and not self._weighted)):
            raise ParamError(
                "train_minibatch_fn: with backward_passes_per_step, a loss whose weight is not the "
                "rows must be the only loss of its batch, because gradients that accumulate are "
                "divided by one number. Set backward_passes_per_step=1, return losses that are "
                "means over rows, or add the losses up before loss_fn.scale()."
            )
        return self._factors(losses)

    def without_rows(self) -> None:
        """Take part in a micro-batch in which this rank has no rows."""
        if self.is_last and self._agree(None):
            self._ratio(0.0)

    def before_step(self) -> None:
        """Divide the gradients that wait for further micro-batches, if an optimizer steps now."""
        if not self.is_last and self._earlier is not None:
            self._divided(torch.zeros_like(self._earlier))

    def _factors(self, losses: Sequence[WeightedLoss]) -> list[Any]:
        totals = [None] * len(losses) if self._totals is None else list(self._totals())
        factors: list[Any] = []
        for loss, total in zip(losses, totals, strict=True):
            if loss.kind == "rows":
                factors.append(self.rows * self._per_row)
            elif loss.kind == "sum":
                factors.append(self._micro_batches if self.rows else 0.0)
            elif total is not None and loss.kind == "targets":
                share = loss.weight * self._micro_batches / total
                factors.append(torch.where(total > 0, share, 0.0))
            else:
                factors.append(loss.weight * self._per_row * self._ratio(loss.weight))
        return factors

    def _agree(self, stated: Any) -> bool:
        """Return whether losses state weights.

        In the first step, the ranks agree once, because a rank without rows does not know.
        """
        is_stated = stated is not None or self._earlier is not None
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
        return bool(self._are_stated)

    def _ratio(self, weight: Any) -> Any:
        """Return rows / weights of all micro-batches and ranks; 1 before the last micro-batch."""
        weight = torch.as_tensor(weight, dtype=torch.float64)
        own = torch.stack([weight, torch.full_like(weight, self.rows)])
        # The same device on all ranks.
        own = own.to(next((p.device for p in self._parameters()), own.device))
        if self.is_last:
            return self._divided(own)
        self._earlier = own if self._earlier is None else own + self._earlier
        return 1.0

    def _divided(self, own: torch.Tensor) -> torch.Tensor:
        """Return the step's ratio, and multiply the gradients of earlier micro-batches by it."""
        earlier, self._earlier = self._earlier, None
        weight, rows = sum_tensor(own if earlier is None else own + earlier, "denominators")
        ratio = torch.where(weight > 0, rows / weight, 0.0)
        if earlier is not None:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * ratio.to(parameter.grad.dtype)
        return ratio


class StepLoss:
    """Loss for a custom step, scaled to this rank's share of the global batch.

    Parameters
    ----------
    loss : LossParts or None
        The user's losses.
    parts : callable
        Returns the weighted losses of outputs, labels and sample weights.
    weights : StepWeights
        Weights of the step's losses.

    Attributes
    ----------
    computed : tuple or None
        The newest loss of this batch alone, and its numerator and denominator.
    """

    def __init__(
        self, loss: LossParts | None, parts: Callable[..., list[WeightedLoss]], weights: StepWeights
    ) -> None:
        self._loss = loss
        self._parts = parts
        self._weights = weights
        self.computed: tuple[torch.Tensor, torch.Tensor] | None = None
        # The newest loss that was passed to scale(), and the result.
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, outputs: Any, labels: Any, weights: Any = None) -> torch.Tensor:
        """Return the loss of outputs and labels, given as lists or as bare tensors.

        Lists have one tensor per label. A joint loss takes the model's return value and a list of
        labels. The weights of a cross-entropy loss are summed over the ranks, so all ranks must
        call equally often.
        """
        parts = self._parts(outputs, labels, weights)
        assert self._loss is not None
        mean = self._loss.mean(parts)
        if self._loss.has_one_denominator:
            self.computed = mean, self._loss.counted(parts)
        else:
            self.computed = measured(WeightedLoss(mean, self._weights.rows))
        return self._loss.scaled(parts, self._weights.of_call(parts))

    def scale(self, loss: torch.Tensor, denominator: Any = None) -> torch.Tensor:
        """Scale a loss that the step computed itself, for its backward pass.

        Parameters
        ----------
        loss : torch.Tensor
            Loss of this rank's batch.
        denominator : torch.Tensor or float, optional
            Number of units in the loss's mean, such as tokens that count. Default: rows. The
            denominators are summed over the ranks, so all ranks must call equally often.
        """
        part = WeightedLoss(loss, self._weights.rows)
        if denominator is not None:
            _, stated = as_stated({"loss": loss, "denominator": denominator}, "loss_fn.scale")
            part = WeightedLoss(loss, stated, "stated")
        self.computed = loss, measured(part)[1]
        (factor,) = self._weights.of_call([part])
        scaled: torch.Tensor = loss * factor
        self._scaled = loss.detach(), scaled.detach()
        return scaled

    def in_step(self, returned: Any) -> Any:
        """Return the contribution to the step, on this rank, of a loss that a closure returned.

        A closure may return the loss that it passed to `scale`, or the scaled loss.
        """
        if self._scaled is None or returned is None:
            return returned
        given, scaled = self._scaled
        return scaled if float(returned) == float(given) else returned


def measured(part: WeightedLoss) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss of this batch alone, and its numerator and denominator."""
    return part.mean, part.counted()[:, None]
