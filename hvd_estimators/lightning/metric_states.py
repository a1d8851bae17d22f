"""Metrics of torchmetrics on several ranks: they know ``torch.distributed`` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from hvd_estimators.lightning.collectives import gather_metric_state
from hvd_estimators.torch.copies import on_cpu

__all__ = ["connect_metrics", "metric_states", "restore_metrics"]


def connect_metrics(module: torch.nn.Module) -> Callable[[], None]:
    """Let a module's metrics add up over the ranks.

    Returns
    -------
    callable
        Leaves them as they were.
    """
    connected = []
    for metric in module.modules():
        if isinstance(metric, Metric):
            connected.append((metric, metric.distributed_available_fn, metric.dist_sync_fn))
            metric.distributed_available_fn = _always
            metric.dist_sync_fn = gather_metric_state

    def disconnect() -> None:
        for metric, available, sync in connected:
            metric.distributed_available_fn, metric.dist_sync_fn = available, sync

    return disconnect


def metric_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return what each metric of a module has counted on this rank, by its name."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            # Of metrics with the same states it updates one, and the others when it is asked.
            part.values(copy_state=False)
    return {
        name: {
            "states": on_cpu(metric.metric_state),
            "updates": metric.update_count,
            "computed": on_cpu(metric._computed),
        }
        for name, metric in _named_metrics(module)
    }


def restore_metrics(module: torch.nn.Module, states: Sequence[Mapping[str, Any]]) -> None:
    """Let a module's metrics go on from what they had counted.

    Parameters
    ----------
    module : torch.nn.Module
        Holds the metrics.
    states : sequence of mapping
        What `metric_states` returned on the ranks in whose place this one is.
    """
    for name, metric in _named_metrics(module):
        found = [of_rank[name] for of_rank in states if name in of_rank]
        if not found:
            continue
        for state in metric.metric_state:
            values = [of_rank["states"][state] for of_rank in found]
            setattr(metric, state, _combined(values, metric._reductions[state], metric.device))
        metric._update_count = sum(of_rank["updates"] for of_rank in found)
        metric._computed = found[0]["computed"] if len(found) == 1 else None


def _named_metrics(module: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _combined(values: Sequence[Any], reduction: Any, device: Any) -> Any:
    """Return a state that stands for those of several ranks."""
    first = values[0]
    if isinstance(first, list):
        return [tensor.to(device) for value in values for tensor in value]
    # Without a reduction nobody can tell what several are together.
    if len(values) > 1 and reduction is not None:
        return reduction(torch.stack(list(values))).to(device)
    return first.to(device)


def _always() -> bool:
    return True
