"""Metrics of torchmetrics on several ranks: they know ``torch.distributed`` only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.collectives import gather_metric_state

__all__ = ["connect_metrics"]


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


def _always() -> bool:
    return True
