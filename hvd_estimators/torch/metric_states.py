"""The states of torchmetrics' metrics: captured, merged over ranks, restored. Runs on the ranks.

torchmetrics itself knows ``torch.distributed`` only. Imported without torchmetrics, which only
users of its metrics need.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_estimators.torch.copies import on_cpu

__all__ = [
    "connect_metrics",
    "has_state",
    "merge_metrics",
    "metric_states",
    "named_metrics",
    "restore_metrics",
]

MetricStates = Mapping[str, Mapping[str, Any]]
"""By name of a metric: its ``states``, the number of its ``updates``, and ``computed``."""


def has_state(metric: Any) -> bool:
    """Return whether an object is a metric of torchmetrics, or a collection of them."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    return isinstance(metric, (torchmetrics.Metric, torchmetrics.MetricCollection))


def named_metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the metrics in a module, or of a metric itself, with their names."""
    return ((name, part) for name, part in module.named_modules() if _is_metric(part))


def connect_metrics(
    module: torch.nn.Module, gather: Callable[[Any], Sequence[Any]]
) -> Callable[[], None]:
    """Make a module's metrics compute their values from the states of all ranks.

    Parameters
    ----------
    module : torch.nn.Module
        Holds the metrics.
    gather : callable
        Gathers an object of every rank. Called by all ranks if a metric is computed.

    Returns
    -------
    callable
        Disconnects the metrics.
    """
    connected = []
    for _, metric in named_metrics(module):
        if not metric.metric_state:
            continue  # A metric that is composed of others has none: those are connected.
        connected.append((metric, metric.distributed_available_fn))
        metric.distributed_available_fn = _always
        # torchmetrics' own gathers each tensor, and hangs if ranks hold lists of unequal lengths.
        metric._sync_dist = functools.partial(_merge_over_ranks, metric, gather)

    def disconnect() -> None:
        for metric, available in connected:
            metric.distributed_available_fn = available
            del metric._sync_dist

    return disconnect


def metric_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state of each metric in a module, by its name, on the CPU."""
    for part in module.modules():
        if _is_collection(part):
            # A collection updates one of its metrics with equal states, and the others on demand.
            collection: Any = part
            collection.values(copy_state=False)
    return {name: _state(metric) for name, metric in named_metrics(module)}


def merge_metrics(module: torch.nn.Module, parts: Sequence[MetricStates]) -> None:
    """Set a module's metrics to the merged states of several ranks, ready to be computed.

    Parameters
    ----------
    module : torch.nn.Module
        Holds the metrics.
    parts : sequence of mapping
        Results of `metric_states`, in the order of the ranks.
    """
    for name, metric in named_metrics(module):
        _merge(metric, [part[name] for part in parts if name in part])
        metric.distributed_available_fn = _never


def restore_metrics(module: torch.nn.Module, parts: Sequence[MetricStates]) -> None:
    """Let a module's metrics resume from the states of the ranks that this rank replaces.

    Parameters
    ----------
    module : torch.nn.Module
        Holds the metrics.
    parts : sequence of mapping
        Results of `metric_states` on those ranks.
    """
    for name, metric in named_metrics(module):
        found = [part[name] for part in parts if name in part]
        if not found:
            continue
        for state, value in found[0]["states"].items():
            reduction = metric._reductions[state]
            if len(found) == 1 or (reduction is None and not isinstance(value, list)):
                # The states of several ranks are not one that could be updated.
                setattr(metric, state, _on(metric.device, value))
            elif isinstance(value, list):
                values = [entry for part in found for entry in part["states"][state]]
                setattr(metric, state, _on(metric.device, values))
            else:
                stacked = torch.stack([part["states"][state] for part in found])
                setattr(metric, state, reduction(stacked).to(metric.device))
        metric._update_count = sum(part["updates"] for part in found)
        metric._computed = found[0]["computed"] if len(found) == 1 else None


def _state(metric: Any) -> dict[str, Any]:
    return {
        "states": on_cpu(metric.metric_state),
        "updates": metric.update_count,
        "computed": on_cpu(metric._computed),
    }


def _merge_over_ranks(
    metric: Any, gather: Callable[[Any], Sequence[Any]], *_: Any, **__: Any
) -> None:
    updates = metric.update_count
    _merge(metric, gather(_state(metric)))
    metric._update_count = updates


def _merge(metric: Any, parts: Sequence[Mapping[str, Any]]) -> None:
    """Reduce states as the metric says, as torchmetrics does over ``torch.distributed``."""
    # A rank without rows has the state of a new metric. Wrappers do not count their updates.
    seen = [part for part in parts if part["updates"]] or parts
    metric._update_count = sum(part["updates"] for part in seen)
    metric._computed = None
    for state, reduction in metric._reductions.items():
        values = [part["states"][state] for part in seen]
        if values:
            setattr(metric, state, _on(metric.device, _reduced(values, reduction, seen)))


def _reduced(values: Sequence[Any], reduction: Any, parts: Sequence[Mapping[str, Any]]) -> Any:
    if len(values) == 1 or (reduction is None and not any(part["updates"] for part in parts)):
        return values[0]
    if isinstance(values[0], list):
        joined = [entry for value in values for entry in value]
        return joined if reduction is None or not joined else reduction(joined)
    if reduction is _dim_zero_mean() and any(part["updates"] for part in parts):
        weights = torch.tensor([float(part["updates"]) for part in parts], dtype=torch.float64)
        stacked = torch.stack([value.double() for value in values])
        return torch.tensordot(weights / weights.sum(), stacked, 1).to(values[0].dtype)
    stacked = torch.stack(list(values))
    return stacked if reduction is None else reduction(stacked)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, entry) for entry in value] if isinstance(value, list) else value


def _is_metric(part: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.Metric)


def _is_collection(part: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(part, torchmetrics.MetricCollection)


def _dim_zero_mean() -> Any:
    return sys.modules["torchmetrics"].utilities.dim_zero_mean


def _always() -> bool:
    return True


def _never() -> bool:
    return False
