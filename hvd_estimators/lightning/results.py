"""Logged values: reduced over the ranks, saved in checkpoints, and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torchmetrics import Metric

from hvd_estimators.lightning.collectives import gather_objects
from hvd_estimators.lightning.package import Flavor, ResultCollection, of_flavor, patch_method
from hvd_estimators.torch.transfer import on_cpu

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric

    from hvd_estimators.lightning.package import Flavor

__all__ = ["RankResults", "logged_so_far", "reduce_results", "restore_logged", "results_of"]

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


class RankResults(ResultCollection):
    """Logged values of one rank, and those of all ranks once they have been reduced.

    Lightning reduces a value when somebody first reads it: one rank that reads alone, such as the
    one with the progress bar, would wait for the others for ever. Here `reduce` does it, called by
    all ranks. Before, a read gives the rank's own value.

    Attributes
    ----------
    everything : bool
        Whether to reduce values without ``sync_dist`` too, so that callbacks see the same on every
        rank.
    rows : dict
        Rows of the batch for which a value was last logged.
    logged_in_step : dict
        Values that the current step has logged, and the rows that they count for.
    of_last_steps : dict
        Values that are logged for steps only, of the last step that was reduced.
    rows_of_epoch : int
        Rows of this rank since the epoch, or the validation, began. They weight what hooks log for
        the epoch as a whole.
    of_epoch : set of str
        Values that hooks logged for the epoch as a whole.
    """

    everything = False

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.rows: dict[str, float] = {}
        self.of_last_steps: dict[str, torch.Tensor] = {}
        self.logged_in_step: dict[str, tuple[Any, int]] = {}
        self.rows_of_epoch = 0
        self.of_epoch: set[str] = set()
        self._is_of_epoch = False

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Take a value, and note whether it was logged outside of batches, for the epoch."""
        self._is_of_epoch = self.batch is None and kwargs.get("batch_size") is None
        super().log(*args, **kwargs)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Begin a new epoch, unless only some values are reset."""
        super().reset(metrics, fx)
        if metrics is None and fx is None:
            self.rows_of_epoch = 0
            self.of_epoch.clear()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take a value that was logged for a batch of so many rows."""
        super().update_metrics(key, value, batch_size)
        (self.of_epoch.add if self._is_of_epoch else self.of_epoch.discard)(key)
        self.rows[key] = batch_size if self.batch_size is None else self.batch_size
        self.logged_in_step[key] = value, batch_size

    def count_by(self, loss: torch.Tensor, denominator: Any) -> None:
        """Count the loss by its denominator where this step logged it.

        A value that was logged with a ``batch_size`` of the user's own stays as it is.
        """
        for key, (value, batch_size) in self.logged_in_step.items():
            is_loss = isinstance(value, torch.Tensor) and torch.equal(
                value.detach().reshape(-1).to(loss), loss.reshape(-1)
            )
            if not is_loss or batch_size != (self.batch_size or batch_size):
                continue
            metric = self[key]
            self.rows[key] = float(denominator)
            if metric.meta.on_epoch and metric.meta.is_mean_reduction:
                metric.value = metric.value + value * (float(denominator) - batch_size)
                metric.cumulated_batch_size = metric.cumulated_batch_size + (
                    float(denominator) - batch_size
                )

    def reduce(self, only_steps: bool = False) -> None:
        """Reduce what has been logged since the values were last reduced. Called by all ranks.

        Parameters
        ----------
        only_steps : bool
            Whether to leave values of an epoch, which is not over, alone.
        """
        own = self._own(only_steps)
        ranks = [own] if hvd.size() == 1 else gather_objects(own)
        for key in sorted(self):
            if not (only_steps and self[key].meta.on_epoch):
                self._take(key, self[key], [o[key] for o in ranks if key in o], len(ranks))

    def metrics(self, on_step: bool) -> Any:
        """Return what callbacks, loggers and progress bars see, during steps or after an epoch.

        With ``everything``, callbacks see what is logged for steps only, too, when an epoch is
        over: the value of the last step, of all ranks.
        """
        metrics = super().metrics(on_step)
        if not on_step and self.training:
            metrics["callback"].update(self.last_steps())
        return metrics

    def last_steps(self) -> dict[str, torch.Tensor]:
        """Return what was logged for steps only, as of the last step."""
        return {
            self[key].meta.name: value
            for key, value in self.of_last_steps.items()
            if not self[key].has_reset
        }

    def names(self) -> set[str]:
        """Return the names under which callbacks see the values of an epoch."""
        return {self._forked_name(metric, on_step=False)[0] for metric in self.values()}

    def _own(self, only_steps: bool) -> dict[str, Any]:
        """Return what the other ranks are to know: value and weight of each result."""
        own: dict[str, Any] = {}
        for key, metric in self.items():
            if metric.has_reset:
                continue
            if not metric.meta.on_epoch:
                if self.everything:
                    own[key] = _number(metric._forward_cache), self.rows.get(key, 0)
            elif not only_steps and metric._computed is None and self._is_shared(metric):
                own[key] = None
                if metric.is_tensor:
                    rows = self.rows_of_epoch if key in self.of_epoch else None
                    own[key] = _number(metric.value), _weight(metric), rows
        return own

    def _is_shared(self, metric: _ResultMetric) -> bool:
        sync = metric.meta.sync
        return not sync.rank_zero_only and (self.everything or sync.should or not metric.is_tensor)

    def _take(self, key: str, metric: _ResultMetric, parts: Sequence[Any], ranks: int) -> None:
        if metric.has_reset:
            return
        if not metric.meta.on_epoch:
            rows = sum(weight for value, weight in parts if value is not None)
            if rows:
                total = sum(value * weight for value, weight in parts if value is not None)
                self.of_last_steps[key] = (total / rows).to(metric.value.device, torch.float32)
        elif metric._computed is None:
            if not metric.is_tensor and len(parts) == ranks:
                metric.compute()  # gathers its state from all ranks
            elif not metric.is_tensor or not parts:
                metric._computed = _alone(metric)
            else:
                value = metric.value
                reduced: Any = _combined(metric, parts).to(value.device, value.dtype)
                metric._computed = reduced

    # An instance method instead of the base's static one: it can be called as either.
    def _get_cache(  # type: ignore[override]
        self, result_metric: _ResultMetric, on_step: bool
    ) -> torch.Tensor | None:
        if on_step or not result_metric.meta.on_epoch or result_metric._computed is not None:
            return super()._get_cache(result_metric, on_step)
        own = _alone(result_metric)
        return own.detach() if isinstance(own, torch.Tensor) else own


def results_of(trainer: Trainer) -> tuple[RankResults, RankResults]:
    """Return the results of training, and those of the validation within it."""
    loop: Any = trainer.fit_loop.epoch_loop
    return loop._results, loop.val_loop._results


def _number(value: Any) -> Any:
    return value.detach().cpu().double() if isinstance(value, torch.Tensor) else None


def _weight(metric: _ResultMetric) -> Any:
    return metric.cumulated_batch_size.item() if metric.meta.is_mean_reduction else 1


def _combined(
    metric: _ResultMetric, parts: Sequence[tuple[torch.Tensor, Any, int | None]]
) -> torch.Tensor:
    """Return the value over all ranks, given each rank's value, its weight, and rows of its epoch.

    A value of an epoch weighs as many rows as the rank has had; without rows it does not count.
    """
    if any(rows for _, _, rows in parts):
        parts = [part for part in parts if part[2]]
        if metric.meta.is_mean_reduction:
            parts = [(value / weight * (rows or 0), rows, rows) for value, weight, rows in parts]
    values = torch.stack([value for value, _, _ in parts])
    if metric.meta.is_max_reduction:
        return values.amax(dim=0)
    if metric.meta.is_min_reduction:
        return values.amin(dim=0)
    total = values.sum(dim=0)
    return total / sum(weight for _, weight, _ in parts) if metric.meta.is_mean_reduction else total


def _alone(metric: _ResultMetric) -> Any:
    """Return the value of what this rank has logged, and keep nothing of it."""
    if metric.is_tensor:
        value = metric.value.clone()
        return value / metric.cumulated_batch_size if metric.meta.is_mean_reduction else value
    users: Any = metric.value
    available, users.distributed_available_fn = users.distributed_available_fn, _never
    kept = users._computed
    try:
        users._computed = None
        return users.compute()
    finally:
        users.distributed_available_fn, users._computed = available, kept


def _never() -> bool:
    return False


def reduce_results(
    trainer: Trainer, flavor: Flavor, everything: bool, before_end: Callable[[], None]
) -> Callable[[], None]:
    """Make a trainer reduce what is logged at the end of each epoch, before and after the hooks.

    Parameters
    ----------
    trainer : Trainer
        Its loops get results of ours.
    flavor : Flavor
        Its package.
    everything : bool
        See `RankResults`.
    before_end : callable
        Called before the hooks of an epoch's end.

    Returns
    -------
    callable
        Leaves the trainer and its module as they were, but for the results.
    """
    make = of_flavor(RankResults, flavor)
    fit: Any = trainer.fit_loop.epoch_loop
    loops: tuple[Any, ...] = (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in loops:
        if not isinstance(loop._results, RankResults):
            loop._results = make(training=loop is fit)
        loop._results.everything = everything

    connector, module = trainer._logger_connector, trainer.lightning_module

    def reduce() -> None:
        results = trainer._results
        if isinstance(results, RankResults):
            results.reduce()
        if everything and results is fit.val_loop._results:
            # Callbacks may monitor what training steps have logged when a validation is over.
            fit._results.reduce(only_steps=True)
            connector._callback_metrics.update(fit._results.last_steps())

    def reach_end() -> None:
        before_end()
        reduce()

    undo = contextlib.ExitStack()
    undo.enter_context(patch_method(connector, "epoch_end_reached", before=reach_end))
    # Hooks log, too. In training, callbacks that monitor a value come between these two.
    undo.enter_context(patch_method(connector, "on_epoch_end", before=reduce))
    undo.enter_context(patch_method(module, "on_train_epoch_end", after=reduce))
    return undo.close
