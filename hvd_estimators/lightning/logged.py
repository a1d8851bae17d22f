"""Values that an epoch has logged so far: taken down for a checkpoint within it, and given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.results import RankResults, results_of
from hvd_estimators.torch.copies import on_cpu

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

    from hvd_estimators.lightning.flavor import Flavor

__all__ = ["logged_so_far", "restore_logged"]

_RESULT = "trainer.connectors.logger_connector.result"
# What callbacks, loggers and progress bars have last seen.
_SEEN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def logged_so_far(trainer: Trainer) -> dict[str, Any]:
    """Return what a rank has logged in an epoch, as values that can be pickled.

    Values that are reduced when the epoch is over are those of this rank alone.
    """
    names = {
        id(metric): name
        for name, metric in trainer.lightning_module.named_modules()
        if isinstance(metric, Metric)
    }
    return {
        "results": [_entries(results, names) for results in results_of(trainer)],
        "epochs": [
            {"rows": results.rows_of_epoch, "of_epoch": sorted(results.of_epoch)}
            for results in results_of(trainer)
        ],
        "seen": {kind: on_cpu(dict(getattr(trainer, kind))) for kind in _SEEN},
    }


def restore_logged(trainer: Trainer, states: Sequence[Mapping[str, Any]], flavor: Flavor) -> None:
    """Take up what was logged before.

    Parameters
    ----------
    trainer : Trainer
        Its loops get the values.
    states : sequence of mapping
        What `logged_so_far` returned on the ranks in whose place this one is; where there are none,
        on another one: names are taken of it.
    flavor : Flavor
        The Trainer's package.
    """
    # Lightning begins sums anew in the first batch that it sees of an epoch.
    trainer._logger_connector._first_loop_iter = False
    for kind in _SEEN:
        getattr(trainer, kind).update(states[0]["seen"][kind])
    for index, results in enumerate(results_of(trainer)):
        # Checkpoints of earlier versions have none.
        epochs = [state["epochs"][index] for state in states if "epochs" in state]
        results.rows_of_epoch = sum(epoch["rows"] for epoch in epochs)
        results.of_epoch.update(*(epoch["of_epoch"] for epoch in epochs))
        entries = [state["results"][index] for state in states]
        for key in dict.fromkeys(key for of_rank in entries for key in of_rank):
            _restore(
                trainer,
                results,
                key,
                [of_rank[key] for of_rank in entries if key in of_rank],
                flavor,
            )


def _entries(results: RankResults, names: Mapping[int, str]) -> dict[str, Any]:
    entries = {}
    for key, metric in results.items():
        meta = metric.meta
        entry = {
            "meta": {f.name: getattr(meta, f.name) for f in fields(meta) if f.name != "_sync"},
            "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            "is_tensor": metric.is_tensor,
            "has_reset": metric.has_reset,
            "updates": metric._update_count,
            "of_step": on_cpu(metric._forward_cache),
            "of_epoch": on_cpu(metric._computed),
            "rows": results.rows.get(key, 0),
            "last_step": on_cpu(results.of_last_steps.get(key)),
        }
        if metric.is_tensor:
            entry["value"] = on_cpu(metric.value)
            entry["weight"] = on_cpu(getattr(metric, "cumulated_batch_size", None))
        elif id(metric.value) in names:
            entry["metric"] = names[id(metric.value)]
        else:
            continue  # of a metric that the module does not hold, nobody knows the state
        entries[key] = entry
    return entries


def _restore(
    trainer: Trainer,
    results: RankResults,
    key: str,
    entries: Sequence[dict[str, Any]],
    flavor: Flavor,
) -> None:
    module, strategy = trainer.lightning_module, trainer.strategy
    # A rank that logged nothing has nothing to add.
    first, *others = [e for e in entries if not e["has_reset"]] or entries[:1]
    meta = flavor.get(f"{_RESULT}._Metadata")(**first["meta"])
    meta.sync = flavor.get(f"{_RESULT}._Sync")(fn=strategy.reduce, **first["sync"])
    metric = flavor.get(f"{_RESULT}._ResultMetric")(meta, first["is_tensor"])
    if not metric.is_tensor:
        metric.value = module.get_submodule(first["metric"])
    elif not first["has_reset"]:
        values = [entry["value"] for entry in (first, *others)]
        if meta.on_epoch and others:
            stacked = torch.stack(values)
            if meta.is_max_reduction or meta.is_min_reduction:
                values = [stacked.amax(0) if meta.is_max_reduction else stacked.amin(0)]
            else:
                values = [stacked.sum(0)]
        metric.value = values[0]
        if meta.is_mean_reduction:
            metric.cumulated_batch_size = sum(entry["weight"] for entry in (first, *others))
    metric.has_reset = first["has_reset"]
    results[key] = metric
    if metric.has_reset:
        return
    metric._forward_cache, metric._computed = first["of_step"], first["of_epoch"]
    metric._update_count = sum(entry["updates"] for entry in (first, *others))
    results[key] = metric.to(strategy.root_device)
    results.rows[key] = sum(entry["rows"] for entry in (first, *others))
    if first["last_step"] is not None:
        results.of_last_steps[key] = first["last_step"].to(strategy.root_device)
