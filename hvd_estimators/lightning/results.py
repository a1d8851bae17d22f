"""Logged values of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.torch.collectives import exchange

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def reduce_logged(trainer: Trainer, rows: int, step_rows: int) -> None:
    """Set the logged values of an epoch to their reduction over the ranks. Called by all ranks.

    Lightning reduces values with ``sync_dist`` when they are first read, and waits for ranks that
    neither log nor read them. This function also reduces values without ``sync_dist``, so that
    callbacks see the same values on all ranks. Of values that training steps log for steps only,
    callbacks see the last step's, over all ranks. A validation after that step may replace them.

    Parameters
    ----------
    trainer : Trainer
        The Trainer, at the end of an epoch of training or validation.
    rows : int
        This rank's rows in the epoch.
    step_rows : int
        This rank's rows in the last training step; 0 if its values are reduced already.

    Raises
    ------
    RuntimeError
        If only some ranks have logged a torchmetrics metric.
    """
    steps, epoch = trainer.fit_loop.epoch_loop._results, trainer._results
    assert epoch is not None
    of_steps = steps.items() if step_rows else ()
    logged = {("step", k): m for k, m in of_steps if not m.meta.on_epoch}
    logged |= {("epoch", k): m for k, m in epoch.items() if m.meta.on_epoch}
    logged = {
        key: metric
        for key, metric in sorted(logged.items())
        if not (metric.has_reset or metric.meta.sync.rank_zero_only)
    }
    own = {
        key: _part(metric, step_rows) if metric.is_tensor else None
        for key, metric in logged.items()
    }
    ranks = exchange.gather(own, "lightning.results")
    of_last_step = {}
    for key, metric in logged.items():
        parts = [values[key] for values in ranks if key in values]
        if metric.is_tensor and parts:
            reduced = _combined(metric.meta, parts).to(metric.value.device)
            if metric.meta.on_epoch:
                metric._computed = reduced.to(metric.value.dtype)
            else:
                metric._forward_cache = of_last_step[metric.meta.name] = reduced.float()
        elif not metric.is_tensor and len(parts) == len(ranks):
            metric.compute()  # gathers its state from all ranks
        elif not metric.is_tensor:
            raise RuntimeError(
                f"Only some ranks have logged the metric {metric.meta.name!r}. Log it on all ranks."
            )
    if of_last_step:  # otherwise, Lightning would add the values of the last step
        trainer.callback_metrics.update(of_last_step)


def _part(metric: Any, rows: int) -> tuple[torch.Tensor, Any]:
    """Return a value of this rank and its weight, for the other ranks."""
    value = metric.value.detach().cpu().double()
    if not metric.meta.is_mean_reduction:
        return value, 1
    if metric.meta.on_epoch:
        return value, metric.cumulated_batch_size.item()
    return value * rows, rows


def _combined(meta: Any, parts: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor:
    values = torch.stack([value for value, _ in parts])
    if meta.is_max_reduction:
        return values.amax(dim=0)
    if meta.is_min_reduction:
        return values.amin(dim=0)
    total = values.sum(dim=0)
    if meta.is_mean_reduction:
        return total / sum(weight for _, weight in parts)
    # With sync_dist, the value of a step is the sum over the ranks already.
    return values[0] if meta.sync.should and not meta.on_epoch else total


def epoch_values(trainer: Trainer) -> dict[str, float]:
    """Return the values that an epoch of training or validation has logged, at its end.

    Their names are the ones that callbacks see.
    """
    results: Any = trainer._results
    names = {
        results._forked_name(metric, on_step=False)[0]
        for metric in results.values()
        if metric.meta.on_epoch and not metric.has_reset
    }
    seen = trainer.callback_metrics
    return {name: float(value) for name, value in seen.items() if name in names}


def step_values(trainer: Trainer) -> dict[str, float]:
    """Return the values of the last training step that were logged for steps only."""
    results: Any = trainer.fit_loop.epoch_loop._results
    return {
        metric.meta.name: float(metric._forward_cache)
        for metric in results.values()
        if not (metric.meta.on_epoch or metric.has_reset or metric._forward_cache is None)
    }
