"""Losses and metrics of an epoch: sums over rows on each rank, one reduction at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

__all__ = ["Measures"]

Metric = Callable[[torch.Tensor, torch.Tensor], Any]


class Measures:
    """Adds up the loss and the metrics of batches, each of which counts for its rows.

    Parameters
    ----------
    groups : sequence of sequence of callable
        Metrics ``function(output, label)`` that return a mean over a batch. A group of one is
        applied to every output, any other has one metric per output.
    label_cols : sequence of str
        Names of the outputs' labels.
    """

    def __init__(self, groups: Sequence[Sequence[Metric]], label_cols: Sequence[str]) -> None:
        self._groups = [
            list(group) * len(label_cols) if len(group) == 1 else list(group) for group in groups
        ]
        self._names = [
            f"group_{index}_{label}" for index in range(len(groups)) for label in label_cols
        ]
        self._labels = len(label_cols)
        self._sums: torch.Tensor | None = None
        self._rows = 0

    def add(
        self,
        loss: torch.Tensor,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
    ) -> None:
        """Add a batch.

        Parameters
        ----------
        loss : torch.Tensor
            Its mean loss, sample weights included.
        outputs, labels : sequence of torch.Tensor
            What metrics are computed from.
        """
        rows = len(labels[0])
        self._rows += rows
        with torch.no_grad():
            sums = [loss.detach().double() * rows]
            for group in self._groups:
                for metric, output, label in zip(group, outputs, labels, strict=True):
                    value = torch.as_tensor(metric(output.detach(), label), device=loss.device)
                    sums.append(value * rows)
            # Stays on the GPU, so that steps do not wait for it.
            total = torch.stack([value.reshape(()).double() for value in sums])
            self._sums = total if self._sums is None else self._sums + total

    def means(self) -> dict[str, float]:
        """Return the means over this rank's rows so far."""
        return self._means(self._own())

    def reduced(self, name: str) -> dict[str, float]:
        """Return the means over the rows of all ranks; called on all of them at the same time."""
        return self._means(hvd.allreduce(self._own(), name=f"measures.{name}", op=hvd.Sum))

    def as_record(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Return means as an epoch's record: the loss, and a dict per group of metrics."""
        metrics = [
            {
                name: means[name]
                for name in self._names[index * self._labels : (index + 1) * self._labels]
            }
            for index in range(len(self._groups))
        ]
        return {"loss": means["loss"], "all_metrics": metrics}

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
