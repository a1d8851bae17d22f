"""Collective end of training if a loss or a parameter is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_estimators.exceptions import NotFiniteError
from hvd_estimators.training.object_collectives import ObjectExchange

__all__ = ["NanCheck"]

_NAMED = 5


class NanCheck:
    """Checks after each step if training can continue, with the same answer on all ranks.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    sum_over_ranks : callable
        Sums one number per rank. All ranks call it.
    exchange : ObjectExchange
        Gathers the names of parameters that are not finite. Used only if there are any, or if a
        loss is not finite.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sum_over_ranks: Callable[[float], float],
        exchange: ObjectExchange,
    ) -> None:
        self._rank = rank
        self._size = size
        self._sum_over_ranks = sum_over_ranks
        self._exchange = exchange

    def after_step(
        self, step: int, epoch: int, loss: float | None, parameters: Sequence[str]
    ) -> None:
        """End training if a value is not finite on any rank. All ranks must call it.

        Call it before a checkpoint of the step is saved, so that all kept checkpoints are finite.

        Parameters
        ----------
        step : int
            Optimizer step of the run, from 1.
        epoch : int
            The step's epoch, from 0.
        loss : float or None
            A loss of this rank that is not finite; None if all losses are finite.
        parameters : sequence of str
            Names of the parameters that are not finite after the step.

        Raises
        ------
        NotFiniteError
            On all ranks, with the same message.
        """
        own = loss is not None or bool(parameters)
        if self._size == 1:
            found = [(loss, list(parameters))] if own else []
        elif self._sum_over_ranks(float(own)):
            found = self._exchange.gather((loss, list(parameters)), "not_finite")
        else:
            found = []
        if found:
            raise NotFiniteError(_message(step, epoch, found))


def _message(step: int, epoch: int, found: Sequence[tuple[float | None, list[str]]]) -> str:
    told = [
        f"the loss of rank {rank} is {loss}"
        for rank, (loss, _) in enumerate(found)
        if loss is not None
    ]
    names = list(dict.fromkeys(name for _, parameters in found for name in parameters))
    if names:
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        told.append(f"NaN or infinite after it: {', '.join(map(repr, names[:_NAMED]))}{others}")
    return (
        f"terminate_on_nan: training has ended at step {step} of the run (in epoch {epoch}, the "
        f"first being 0), on all ranks: {'; '.join(told)}. Checkpoints are of steps before this "
        "one, and hold finite parameters. Going on unchanged would end here again: look for "
        "values in the data that are not finite or are very large, set a lower learning rate, or "
        "clip gradients."
    )
