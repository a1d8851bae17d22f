"""Losses and metrics of an epoch: functions, and torchmetrics objects merged over the ranks.

The loss and the values of functions are summed over rows on each rank, with one reduction at the
end of an epoch. torchmetrics objects count in their own states, which are merged over the ranks
then; torchmetrics itself supports only ``torch.distributed``. This module does not import
torchmetrics, which only users of its metrics need.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_estimators.exceptions import ParamError
from hvd_estimators.torch.collectives import current, exchange
from hvd_estimators.torch.loss import Evaluation
from hvd_estimators.torch.tensors import snapshot

logger = logging.getLogger(__name__)

Metric = Callable[..., Any]

MetricStates = Mapping[str, Mapping[str, Any]]
"""Metric name to its ``states``, its number of ``updates``, and its ``computed`` value."""

_LOSS = "loss"
_VALIDATION = "val_"


def is_of_torchmetrics(metric: Any) -> bool:
    """Return whether an object is a torchmetrics metric or a collection of such metrics."""
    return _is_a(metric, "Metric") or _is_a(metric, "MetricCollection")


def _is_a(value: Any, name: str) -> bool:
    """Return whether a value is an instance of a torchmetrics class."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, getattr(torchmetrics, name))


def named_metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the metrics in a module, or in a metric itself, with their names."""
    return ((name, part) for name, part in module.named_modules() if _is_a(part, "Metric"))


def connect_metrics(
    module: torch.nn.Module, gather: Callable[[Any], Sequence[Any]]
) -> Callable[[], None]:
    """Make a module's metrics compute their values from the states of all ranks.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the metrics.
    gather : callable
        Gathers one object per rank. All ranks call it when a metric is computed.

    Returns
    -------
    callable
        Disconnects the metrics.
    """
    connected = []
    for _, metric in named_metrics(module):
        if not metric.metric_state:
            continue  # A composed metric has no state; its parts are connected.
        connected.append((metric, metric.distributed_available_fn))
        metric.distributed_available_fn = _always
        # torchmetrics' own method gathers each tensor, and hangs if ranks hold lists of unequal
        # lengths.
        metric._sync_dist = functools.partial(_merge_over_ranks, metric, gather)

    def disconnect() -> None:
        for metric, available in connected:
            metric.distributed_available_fn = available
            del metric._sync_dist

    return disconnect


def metric_states(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state of each metric in a module by name, on the CPU."""
    for part in module.modules():
        if _is_a(part, "MetricCollection"):
            # A collection updates one of several metrics with equal states. values() updates the
            # others.
            collection: Any = part
            collection.values(copy_state=False)
    return {name: _state(metric) for name, metric in named_metrics(module)}


def merge_metrics(module: torch.nn.Module, parts: Sequence[MetricStates]) -> None:
    """Set a module's metrics to the merged states of several ranks, ready to be computed.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the metrics.
    parts : sequence of mapping
        `metric_states` results, in rank order.
    """
    for name, metric in named_metrics(module):
        _merge(metric, [part[name] for part in parts if name in part])
        metric.distributed_available_fn = _never


def restore_metrics(module: torch.nn.Module, parts: Sequence[MetricStates]) -> None:
    """Resume a module's metrics from the states of the ranks that this rank replaces.

    Parameters
    ----------
    module : torch.nn.Module
        Module with the metrics.
    parts : sequence of mapping
        `metric_states` results of those ranks.
    """
    for name, metric in named_metrics(module):
        captured = [part[name] for part in parts if name in part]
        if captured:
            _merge(metric, captured, resumes=True)


def _state(metric: Any) -> dict[str, Any]:
    return {
        "states": snapshot(metric.metric_state),
        "updates": metric.update_count,
        "computed": snapshot(metric._computed),
    }


def _merge_over_ranks(
    metric: Any, gather: Callable[[Any], Sequence[Any]], *_: Any, **__: Any
) -> None:
    updates = metric.update_count
    _merge(metric, gather(_state(metric)))
    metric._update_count = updates


def _merge(metric: Any, parts: Sequence[Mapping[str, Any]], resumes: bool = False) -> None:
    """Reduce states by the metric's reductions, as torchmetrics does over ``torch.distributed``.

    A metric that ``resumes`` will be updated. It then gets tensors without a reduction from the
    first part, because updates take no stack of them.
    """
    # A rank without rows has the state of a new metric. Wrappers do not count their updates.
    updated = [part for part in parts if part["updates"]] or parts
    metric._update_count = sum(part["updates"] for part in updated)
    metric._computed = parts[0]["computed"] if resumes and len(parts) == 1 else None
    for state, reduction in metric._reductions.items():
        values = [part["states"][state] for part in updated]
        if resumes and reduction is None and not isinstance(values[0], list) and values[1:]:
            logger.warning(
                "%s: its state %s has no reduction. In the resumed epoch, its value lacks the rows "
                "of %d processes that no longer exist.",
                type(metric).__name__,
                state,
                len(values) - 1,
            )
            values = values[:1]
        if values:
            setattr(metric, state, _on(metric.device, _reduced(values, reduction, updated)))


def _reduced(values: Sequence[Any], reduction: Any, parts: Sequence[Mapping[str, Any]]) -> Any:
    if len(values) == 1 or (reduction is None and not any(part["updates"] for part in parts)):
        return values[0]
    if isinstance(values[0], list):
        return [entry for value in values for entry in value]
    mean = sys.modules["torchmetrics"].utilities.dim_zero_mean
    if reduction is mean and any(part["updates"] for part in parts):
        weights = torch.tensor([float(part["updates"]) for part in parts], dtype=torch.float64)
        stacked = torch.stack([value.double() for value in values])
        return torch.tensordot(weights / weights.sum(), stacked, 1).to(values[0].dtype)
    stacked = torch.stack(list(values))
    return stacked if reduction is None else reduction(stacked)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, entry) for entry in value] if isinstance(value, list) else value


def _always() -> bool:
    return True


def _never() -> bool:
    return False


@dataclass(frozen=True)
class _Member:
    """Metric of one output.

    Attributes
    ----------
    metric : callable
        The function or object.
    index : int
        The output's position.
    prefix : str
        Prefix of the names of the metric's values, if these have names.
    keys : mapping or None
        For a collection, maps names in the collection to names of values. None for a single metric.
    """

    metric: Metric
    index: int
    prefix: str
    keys: Mapping[str, str] | None


class Metrics:
    """Groups of metrics, by name.

    A metric is named after the function or the metric's class; a collection has one name per
    metric. With several labels, names start with the label: ``<label>_<name>``. A name that is
    already in use gets a number. A lambda is named ``metric_<number of the group>``.

    Parameters
    ----------
    groups : sequence of sequence of callable
        Functions ``function(output, label)`` that return a mean over a batch, or torchmetrics
        metrics. A group of one applies to every output; any other group has one metric per output.
    label_cols : sequence of str
        Label columns of the outputs.
    upstream_names : bool, default False
        Name metrics ``group_<number>_<label>``, as ``horovod.spark`` does.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Metric]],
        label_cols: Sequence[str],
        upstream_names: bool = False,
    ) -> None:
        self._used_names = {_LOSS}
        self._groups: list[dict[str, _Member]] = []
        for number, group in enumerate(groups):
            members: dict[str, _Member] = {}
            for index, label in enumerate(label_cols):
                metric = group[0] if len(group) == 1 else group[index]
                prefix = f"{label}_" if len(label_cols) > 1 else ""
                member_name = prefix + (_name_of(metric) or f"metric_{number}")
                if upstream_names:
                    member_name = f"group_{number}_{label}"
                    prefix = f"{member_name}_"
                keys = None
                if isinstance(metric, torch.nn.ModuleDict):
                    keys = {key: _unused(prefix + key, self._used_names) for key in metric}
                member_name = _unused(member_name, self._used_names)
                members[member_name] = _Member(metric, index, prefix, keys)
            self._groups.append(members)

    @property
    def function_names(self) -> list[str]:
        """Names of the metric functions, the values of which are averaged."""
        return [name for name, member in self._members() if not is_of_torchmetrics(member.metric)]

    @property
    def names(self) -> list[str] | None:
        """Names of all values; None if only the results determine the names."""
        names: list[str] = []
        for name, member in self._members():
            if is_of_torchmetrics(member.metric) and not _has_scalar_values(member.metric):
                return None
            names += [name] if member.keys is None else member.keys.values()
        return names

    def __call__(self, evaluation: Evaluation) -> dict[str, torch.Tensor]:
        """Return the value of each function for a batch, by name.

        Raises
        ------
        ParamError
            If a function does not return one number.
        """
        measured: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, member in self._members():
                if not is_of_torchmetrics(member.metric):
                    output = evaluation.outputs[member.index].detach()
                    value = member.metric(output, evaluation.labels[member.index])
                    measured[name] = torch.as_tensor(value, device=output.device)
                    if measured[name].numel() != 1:
                        raise ParamError(
                            f"metrics: {name} must return one number per batch, found shape "
                            f"{tuple(measured[name].shape)}. Return a mean over rows, or set one "
                            "function per number."
                        )
        return measured

    def each(self) -> Iterator[tuple[str, Metrics]]:
        """Yield the name of each metric, and an object with this metric alone."""
        for name, member in self._members():
            alone = copy.copy(self)
            alone._groups = [{name: member}]
            yield name, alone

    @property
    def have_state(self) -> bool:
        """Return whether any of the metrics is a torchmetrics object."""
        return any(True for _ in self.with_state())

    def with_state(self) -> Iterator[tuple[str, Any, int]]:
        """Yield name, metric and output position of each torchmetrics metric."""
        for name, member in self._members():
            if is_of_torchmetrics(member.metric):
                yield name, member.metric, member.index

    def by_group(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return values as one dict per group; a metric's named values become separate entries."""
        used = set(self._used_names)
        groups = []
        for group in self._groups:
            named_values: dict[str, Any] = {}
            for name, member in group.items():
                if name not in values:
                    continue
                value = values[name]
                if not isinstance(value, Mapping):
                    named_values[name] = value
                    continue
                for key, entry in value.items():
                    known = None if member.keys is None else member.keys.get(key)
                    named_values[known or _unused(member.prefix + key, used)] = entry
            groups.append(named_values)
        return groups

    def _members(self) -> Iterator[tuple[str, _Member]]:
        return ((name, member) for group in self._groups for name, member in group.items())


class EpochMetricStates:
    """States of an epoch's torchmetrics metrics on this rank.

    Parameters
    ----------
    metrics : Metrics
        The metrics; their own states are not changed.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counting: dict[str, Any] = {}
        self._earlier: list[Mapping[str, Any]] = []
        self._device = torch.device("cpu")

    def update(self, evaluation: Evaluation) -> None:
        """Count a batch."""
        with torch.no_grad():
            for name, metric, index in self._metrics.with_state():
                output, label = evaluation.outputs[index].detach(), evaluation.labels[index]
                if name not in self._counting:
                    self._device = output.device
                    self._counting[name] = _new(metric).to(self._device)
                if _takes_class_numbers(metric):
                    label = _as_class_numbers(name, label)
                self._counting[name].update(output, label)

    def capture(self) -> list[Mapping[str, Any]]:
        """Return this rank's states, and the states that it has resumed from."""
        own = {name: metric_states(metric) for name, metric in self._counting.items()}
        return [*self._earlier, own] if own else list(self._earlier)

    def restore(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Resume from `capture` results, which `values` merges with this rank's states."""
        self._earlier = list(parts)

    def values(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the value of each metric over the states of all ranks.

        Parameters
        ----------
        parts : sequence of mapping
            `capture` results of all ranks, in rank order.

        Returns
        -------
        dict
            Numbers, or lists and dicts of numbers for metrics with several values.
        """
        values: dict[str, Any] = {}
        for name, metric, _ in self._metrics.with_state():
            captured = [part[name] for part in parts if name in part]
            if not captured:
                values[name] = float("nan")
                continue
            merged = _new(metric).to(self._device)
            merge_metrics(merged, captured)
            values[name] = _as_numbers(merged.compute())
        return values


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
        self._states = EpochMetricStates(metrics) if metrics.have_state else None
        self._sums: torch.Tensor | None = None
        # Without metrics, a loss that is a mean over rows is summed with one operation per batch.
        self._row_mean: torch.Tensor | None = None
        self._rows_of_mean = 0
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
        if evaluation.counted is None and not measured:
            self._add_row_mean(evaluation.loss.detach(), rows)
        else:
            self._add_sums(torch.cat([evaluation.numerators().reshape(-1), *measured]))
        if self._states is not None:
            self._states.update(evaluation)

    def _add_row_mean(self, loss: torch.Tensor, rows: int) -> None:
        if self._row_mean is None:
            self._row_mean = torch.zeros((), dtype=torch.float64, device=loss.device)
        # The loss is converted to float64 before the multiplication.
        self._row_mean.add_(loss, alpha=rows)
        self._rows_of_mean += rows

    def _add_sums(self, total: torch.Tensor) -> None:
        if self._sums is None:
            self._sums = total
        elif self._sums.device == total.device:
            self._sums += total
        else:  # after a restart
            self._sums = self._sums.to(total.device) + total

    def state(self) -> dict[str, Any]:
        """Return this rank's sums and states so far, for `restore`."""
        states = [] if self._states is None else self._states.capture()
        return {"sums": self._own().numpy(), "metrics": states}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the `state` results of the ranks that this rank replaces."""
        if states:
            rows, *_ = sums = sum(state["sums"] for state in states)
            self._rows = int(rows)
            self._sums = torch.from_numpy(sums[1:].copy())
        if self._states is not None:
            self._states.restore([part for state in states for part in state["metrics"]])

    def means(self) -> dict[str, float]:
        """Return this rank's means so far, of the loss and of metric functions."""
        return self._means(self._own())

    def reduced(self, name: str) -> dict[str, Any]:
        """Return the values over the rows of all ranks. Called by all ranks at the same time."""
        means = self._means(current().reduce(self._own(), "sum", f"measures.{name}"))
        if self._states is None:
            return means
        ranks = exchange.gather(self._states.capture(), f"measures.{name}.states")
        return {**means, **self._states.values([part for rank in ranks for part in rank])}

    def values(self) -> dict[str, Any]:
        """Return the values over the rows of this object alone."""
        if self._states is None:
            return self.means()
        return {**self.means(), **self._states.values(self._states.capture())}

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._rows

    def as_record(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values as an epoch's record: the loss, and one dict per group of metrics."""
        return {"loss": values["loss"], "all_metrics": self._metrics.by_group(values)}

    def _own(self) -> torch.Tensor:
        counts = torch.tensor([self._rows], dtype=torch.float64)
        if self._sums is None:
            sums = torch.zeros(2 * self._parts + len(self._names), dtype=torch.float64)
        else:
            sums = self._sums.cpu().clone()
        if self._row_mean is not None:
            sums[0] += self._row_mean.cpu()
            sums[self._parts] += self._rows_of_mean
        return torch.cat([counts, sums])

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


def _new(metric: Any) -> Any:
    new = copy.deepcopy(metric)
    new.reset()
    return new


def _name_of(metric: Any) -> str | None:
    """Return the name of a function, or of an object's class; None for a lambda."""
    while isinstance(metric, functools.partial):
        metric = metric.func
    for attribute in ("__name__", "name", "original_name"):
        name = getattr(metric, attribute, None)
        if isinstance(name, str) and name:
            break
    else:
        name = type(metric).__name__
    # The prefix "val_" stands for validation.
    return None if name == "<lambda>" else name.removeprefix(_VALIDATION) or name


def _unused(name: str, used: set[str]) -> str:
    """Return an unused name, with a number if needed, and mark it as used."""
    unused, number = name, 2
    while unused in used:
        unused, number = f"{name}_{number}", number + 1
    used.add(unused)
    return unused


def _has_scalar_values(metric: Any) -> bool:
    """Return whether each metric has one value, judging by its attributes."""
    members = metric.values() if isinstance(metric, torch.nn.ModuleDict) else [metric]
    return all(
        not any(is_of_torchmetrics(part) for part in member.children())
        and getattr(member, "average", "") not in (None, "none")
        for member in members
    )


def _takes_class_numbers(metric: Any) -> bool:
    """Return whether all metrics of an object take labels as integers."""
    leaves = [
        part
        for part in metric.modules()
        if is_of_torchmetrics(part)
        and not any(is_of_torchmetrics(child) for child in part.children())
    ]
    return all(type(leaf).__module__.startswith("torchmetrics.classification") for leaf in leaves)


def _as_class_numbers(name: str, label: torch.Tensor) -> torch.Tensor:
    """Return labels as integers; a loss may need the same labels as floats."""
    if not label.is_floating_point():
        return label
    numbers = label.long()
    different = label[numbers != label]
    if different.numel():
        raise ValueError(
            f"metrics: {name} takes class numbers as labels, found {different[0].item()}. "
            "Set another metric, or a function that rounds the labels."
        )
    return numbers


def _as_numbers(value: Any) -> Any:
    """Convert a metric's value to numbers, or to lists and dicts of numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _as_numbers(entry) for key, entry in value.items()}
    return [_as_numbers(entry) for entry in value] if isinstance(value, (list, tuple)) else value
