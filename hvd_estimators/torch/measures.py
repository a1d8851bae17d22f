"""Losses and metrics of an epoch: sums over rows on each rank, one reduction at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.parquet.columns import Array
from hvd_estimators.torch.objective import Evaluation, Metrics

__all__ = ["Measures"]


class Measures:
    """Adds up the loss and the metrics of batches, each weighted by its rows.

    Parameters
    ----------
    metrics : Metrics
        What is measured besides the loss.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._names = metrics.names
        self._sums: torch.Tensor | None = None
        self._rows = 0

    def add(self, evaluation: Evaluation) -> None:
        """Add a batch."""
        rows = evaluation.rows
        self._rows += rows
        values = [evaluation.loss.detach(), *self._metrics(evaluation).values()]
        # It stays on the GPU, so that steps do not wait for it, and becomes 64 bits before it is
        # multiplied.
        total = torch.cat([value.reshape(1).double() for value in values]).mul_(rows)
        if self._sums is None:
            self._sums = total
        elif self._sums.device == total.device:
            self._sums += total
        else:  # after a restart
            self._sums = self._sums.to(total.device) + total

    def state(self) -> Array:
        """Return this rank's sums so far."""
        own: Array = self._own().numpy()
        return own

    def restore(self, state: Array) -> None:
        """Go on from what `state` returned."""
        rows, *_ = state.tolist()
        self._rows = int(rows)
        self._sums = torch.from_numpy(state[1:].copy())

    def means(self) -> dict[str, float]:
        """Return the means over this rank's rows so far."""
        return self._means(self._own())

    def reduced(self, name: str) -> dict[str, float]:
        """Return the means over the rows of all ranks; called on all of them at the same time."""
        return self._means(hvd.allreduce(self._own(), name=f"measures.{name}", op=hvd.Sum))

    def as_record(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Return means as an epoch's record: the loss, and a dict per group of metrics."""
        return {"loss": means["loss"], "all_metrics": self._metrics.by_group(means)}

    def _own(self) -> torch.Tensor:
        counts = torch.tensor([self._rows], dtype=torch.float64)
        if self._sums is None:
            return torch.cat([counts, torch.zeros(1 + len(self._names), dtype=torch.float64)])
        return torch.cat([counts, self._sums.cpu()])

    def _means(self, sums: torch.Tensor) -> dict[str, float]:
        rows, *totals = sums.tolist()
        return {
            name: total / rows if rows else float("nan")
            for name, total in zip(("loss", *self._names), totals, strict=True)
        }
