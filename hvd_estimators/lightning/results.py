"""Logged values and their reduction over the ranks; steps without effect on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.package import (
    Flavor,
    ResultCollection,
    is_library,
    of_flavor,
    patch_method,
)
from hvd_estimators.torch.collectives import current, exchange

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric


class RankResults(ResultCollection):
    """Logged values of one rank, and values of all ranks after a reduction.

    Lightning reduces a value on its first read. A rank that reads alone, such as the one with the
    progress bar, would wait for the others indefinitely. Therefore all ranks call `reduce` instead.
    Before that, a read returns the rank's own value.

    Attributes
    ----------
    everything : bool
        Whether to reduce values without ``sync_dist`` too, so that callbacks see the same
        values on every rank.
    rows : dict
        The number of rows in the batch for which each value was last logged.
    logged_in_step : dict
        Values that the current step has logged, each with its number of rows.
    of_last_steps : dict
        Values that are logged for steps only, from the last reduced step.
    rows_of_epoch : int
        This rank's rows since the start of the epoch or validation. They weight values that
        hooks log for the whole epoch.
    of_epoch : set of str
        Values that hooks logged for the whole epoch.
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
        """Log a value, and note whether it was logged outside of batches, for the epoch."""
        self._is_of_epoch = self.batch is None and kwargs.get("batch_size") is None
        super().log(*args, **kwargs)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Start a new epoch, unless only some values are reset."""
        super().reset(metrics, fx)
        if metrics is None and fx is None:
            self.rows_of_epoch = 0
            self.of_epoch.clear()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Store a value that was logged for a batch with this number of rows."""
        super().update_metrics(key, value, batch_size)
        (self.of_epoch.add if self._is_of_epoch else self.of_epoch.discard)(key)
        self.rows[key] = batch_size if self.batch_size is None else self.batch_size
        self.logged_in_step[key] = value, batch_size

    def count_by(self, loss: torch.Tensor, denominator: Any) -> None:
        """Weight the loss by its denominator if this step logged it.

        A value that the user logged with another ``batch_size`` does not change.
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
        """Reduce the values logged since the last reduction. Called by all ranks.

        Parameters
        ----------
        only_steps : bool
            Whether to skip values of the epoch, because it has not ended.
        """
        own = self._own(only_steps)
        ranks = [own] if current().size == 1 else exchange.gather(own, "lightning.results")
        for key in sorted(self):
            if not (only_steps and self[key].meta.on_epoch):
                self._reduce_value(key, self[key], [o[key] for o in ranks if key in o], len(ranks))

    def metrics(self, on_step: bool) -> Any:
        """Return metrics for callbacks, loggers and progress bars, during steps or after an epoch.

        With ``everything``, callbacks also see values that are logged for steps only. At the end
        of an epoch they see the value of the last step, over all ranks.
        """
        metrics = super().metrics(on_step)
        if not on_step and self.training:
            metrics["callback"].update(self.last_steps())
        return metrics

    def last_steps(self) -> dict[str, torch.Tensor]:
        """Return the values that were logged for steps only, as of the last step."""
        return {
            self[key].meta.name: value
            for key, value in self.of_last_steps.items()
            if not self[key].has_reset
        }

    def names(self) -> set[str]:
        """Return the names under which callbacks see the values of an epoch."""
        return {self._forked_name(metric, on_step=False)[0] for metric in self.values()}

    def _own(self, only_steps: bool) -> dict[str, Any]:
        """Return value and weight of each result of this rank, for the other ranks."""
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

    def _reduce_value(
        self, key: str, metric: _ResultMetric, parts: Sequence[Any], ranks: int
    ) -> None:
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

    # The base's method is static; an instance method works for the same calls.
    def _get_cache(  # type: ignore[override]
        self, result_metric: _ResultMetric, on_step: bool
    ) -> torch.Tensor | None:
        if on_step or not result_metric.meta.on_epoch or result_metric._computed is not None:
            return super()._get_cache(result_metric, on_step)
        own = _alone(result_metric)
        return own.detach() if isinstance(own, torch.Tensor) else own


def results_of(trainer: Trainer) -> tuple[RankResults, RankResults]:
    """Return the results of training and of its validation."""
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

    A value logged for the whole epoch has the rank's number of rows as weight. A value of a rank
    without rows does not count.
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
    """Return this rank's value without storing it."""
    if metric.is_tensor:
        value = metric.value.clone()
        return value / metric.cumulated_batch_size if metric.meta.is_mean_reduction else value
    users: Any = metric.value
    available, users.distributed_available_fn = users.distributed_available_fn, _never
    computed = users._computed
    try:
        users._computed = None
        return users.compute()
    finally:
        users.distributed_available_fn, users._computed = available, computed


def _never() -> bool:
    return False


def reduce_results(
    trainer: Trainer, flavor: Flavor, everything: bool, before_end: Callable[[], None]
) -> Callable[[], None]:
    """Make a trainer reduce logged values at the end of each epoch, before and after the hooks.

    Parameters
    ----------
    trainer : Trainer
        The Trainer; its loops get `RankResults`.
    flavor : Flavor
        The Trainer's package.
    everything : bool
        See `RankResults`.
    before_end : callable
        Called before the hooks of an epoch's end.

    Returns
    -------
    callable
        Restores the trainer and its module, except for the results.
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
            # After a validation, callbacks may monitor values that training steps have logged.
            fit._results.reduce(only_steps=True)
            connector._callback_metrics.update(fit._results.last_steps())

    def reach_end() -> None:
        before_end()
        reduce()

    undo = contextlib.ExitStack()
    undo.enter_context(patch_method(connector, "epoch_end_reached", before=reach_end))
    # Hooks also log values. In training, callbacks that monitor a value run between these two.
    undo.enter_context(patch_method(connector, "on_epoch_end", before=reduce))
    undo.enter_context(patch_method(module, "on_train_epoch_end", after=reduce))
    return undo.close


def lists_with_lengths(
    module: torch.nn.Module, callbacks: Iterable[Any]
) -> list[tuple[list[Any], int]]:
    """Return the lists in attributes of a module and of the user's callbacks, with their lengths.

    Lists can be nested in lists and dicts.
    """
    objects = [part for part in module.modules() if not isinstance(part, Metric)]
    objects += [c for c in callbacks if not is_library(type(c))]
    lists: list[tuple[list[Any], int]] = []
    for entry in objects:
        attributes = getattr(entry, "__dict__", {})
        lists += _lists_in([v for v in attributes.values() if isinstance(v, (list, dict))], 2)
    return lists


def _lists_in(values: Iterable[Any], depth: int) -> Iterator[tuple[list[Any], int]]:
    for value in values:
        if isinstance(value, list):
            yield value, len(value)
        if depth and isinstance(value, (list, dict)):
            inner = value.values() if isinstance(value, dict) else value
            yield from _lists_in([v for v in inner if isinstance(v, (list, dict))], depth - 1)


@contextlib.contextmanager
def without_effects(module: LightningModule, results: ResultCollection | None) -> Iterator[None]:
    """Undo a step's changes to logged values, metrics and buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    metrics = [
        (metric, metric._copy_state_dict(), metric._update_count)
        for metric in module.modules()
        if isinstance(metric, Metric)
    ]
    logged = {
        key: (metric.value, getattr(metric, "cumulated_batch_size", None))
        for key, metric in (results or {}).items()
        if metric.is_tensor
    }
    yield
    for buffer, value in buffers:
        # Bypass autograd: the backward pass, whose gradients have weight zero, runs later.
        buffer.data.copy_(value)
    for metric, state, count in metrics:
        for name, before in state.items():
            setattr(metric, name, before)
        metric._update_count, metric._computed = count, None
    for key, metric in (results or {}).items():
        if not metric.is_tensor:
            continue
        if key in logged:
            metric.value = logged[key][0]
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = logged[key][1]
        elif metric.meta.on_epoch:
            # Retain a value that is logged for the first time, as the value of zero rows.
            metric.reset()
            metric.has_reset = False
