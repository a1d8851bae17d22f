"""Losses and metrics of an epoch: sums and states on each rank, one reduction at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvd_estimators.torch.collectives import exchange
from hvd_estimators.torch.metrics import EpochMetricStates, Metrics
from hvd_estimators.torch.objective import Evaluation

__all__ = ["MetricSums"]


class MetricSums:
    """Sums of the loss and the metrics over batches.

    The epoch's loss is the sum of its numerators over the sum of its denominators, over all rows.
    Values of metric functions are weighted by rows. Metrics of torchmetrics count in their own
    states.

    Parameters
    ----------
    metrics : Metrics
        Metrics besides the loss.
    loss_parts : int
        Number of denominators of the loss, see `Loss.counted`.
    """

    def __init__(self, metrics: Metrics, loss_parts: int = 1) -> None:
        self._metrics = metrics
        self._parts = loss_parts
        self._names = metrics.function_names
        self._states = EpochMetricStates(metrics)
        self._sums: torch.Tensor | None = None
        self._rows = 0

    def add(self, evaluation: Evaluation) -> None:
        """Add a batch."""
        rows = evaluation.rows
        self._rows += rows
        # Sums stay on the GPU, so that steps do not wait for them. The values are converted to
        # float64 before the multiplication.
        measured = [
            value.reshape(1).double() * rows for value in self._metrics(evaluation).values()
        ]
        counted = evaluation.counted
        if counted is None:
            loss = evaluation.loss.detach().reshape(1).double()
            counted = torch.cat([loss * rows, torch.full_like(loss, rows)])
        total = torch.cat([counted.reshape(-1), *measured])
        if self._sums is None:
            self._sums = total
        elif self._sums.device == total.device:
            self._sums += total
        else:  # after a restart
            self._sums = self._sums.to(total.device) + total
        self._states.update(evaluation)

    def state(self) -> dict[str, Any]:
        """Return this rank's sums and states so far, for `restore`."""
        return {"sums": self._own().numpy(), "metrics": self._states.capture()}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the `state` results of the ranks that this rank replaces."""
        if states:
            rows, *_ = sums = sum(state["sums"] for state in states)
            self._rows = int(rows)
            self._sums = torch.from_numpy(sums[1:].copy())
        self._states.restore([part for state in states for part in state["metrics"]])

    def means(self) -> dict[str, float]:
        """Return this rank's means so far, of the loss and of metric functions."""
        return self._means(self._own())

    def reduced(self, name: str) -> dict[str, Any]:
        """Return the values over the rows of all ranks. Called by all ranks at the same time."""
        means = self._means(hvd.allreduce(self._own(), name=f"measures.{name}", op=hvd.Sum))
        if not self._metrics.have_state:
            return means
        ranks = exchange.gather(self._states.capture(), f"measures.{name}.states")
        return {**means, **self._states.values([part for rank in ranks for part in rank])}

    def as_record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as an epoch's record: the loss, and one dict per group of metrics."""
        return {"loss": values["loss"], "all_metrics": self._metrics.by_group(values)}

    def _own(self) -> torch.Tensor:
        counts = torch.tensor([self._rows], dtype=torch.float64)
        if self._sums is None:
            sums = torch.zeros(2 * self._parts + len(self._names), dtype=torch.float64)
            return torch.cat([counts, sums])
        return torch.cat([counts, self._sums.cpu()])

    def _means(self, sums: torch.Tensor) -> dict[str, float]:
        rows, *totals = sums.tolist()
        if not rows:
            return dict.fromkeys(("loss", *self._names), float("nan"))
        parts = self._parts
        # A sum has the denominator 0.
        loss = sum(
            numerator / denominator if denominator else numerator
            for numerator, denominator in zip(
                totals[:parts], totals[parts : 2 * parts], strict=True
            )
        )
        metrics = zip(self._names, totals[2 * parts :], strict=True)
        return {"loss": loss, **{name: total / rows for name, total in metrics}}
