"""Strategy of the estimator: ranks with unequal batches train and measure as one process would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.collectives import outside_inference_mode
from hvd_estimators.lightning.dry_run import takes_tuple
from hvd_estimators.lightning.loaders import TrainLoader, ValidationLoader
from hvd_estimators.lightning.package import ResultCollection
from hvd_estimators.lightning.results import RankResults
from hvd_estimators.lightning.strategy import HorovodStrategy
from hvd_estimators.torch.gradients import GradientAverager
from hvd_estimators.torch.loss import StepShare, as_stated
from hvd_estimators.torch.shard_state import BufferReducer
from hvd_estimators.training.shard_state import ShardStates

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["WeightedStrategy"]


class WeightedStrategy(HorovodStrategy):
    """Weight gradients and logged values by the weight of each rank's batch.

    The gradient of a step is that of the mean over the rows of all ranks. Logged values are
    weighted by rows. A rank without rows in a step takes part without effect on results or state.

    Parameters
    ----------
    train, validation : loader, optional
        Provide the weights of their batches; without a loader, all batches weigh the same.
    shards : ShardStates
        The canonical shards, of which the rank runs one or several.
    batch_hint : str
        A hint for the error of a step that unpacks the batch as a tuple.
    buffers : BufferReducer
        Reduces the module's buffers.
    **kwargs
        See `HorovodStrategy`.
    """

    reduces_everything = True

    def __init__(
        self,
        train: TrainLoader | None = None,
        validation: ValidationLoader | None = None,
        *,
        shards: ShardStates,
        batch_hint: str = "",
        buffers: BufferReducer,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._batch_hint = batch_hint
        self._shards = shards
        self._buffers = buffers
        self._train = train
        self._validation = validation
        self._current: TrainLoader | ValidationLoader | None = None
        self._grown: list[tuple[list[Any], int]] = []

    @property
    def factor(self) -> float:
        """The weight of this rank's gradient in the current step."""
        return 1.0 if self._train is None else self._train.share.factor

    @property
    def has_no_rows(self) -> bool:
        """True if the rank has no rows in the current batch, whose results are discarded."""
        return self._current is not None and self._current.share.is_stand_in

    @property
    def step_share(self) -> StepShare:
        """Weight of this rank's batch in the current step, for losses that scale themselves."""
        if self._train is None:
            return StepShare(1, 1.0, self.world_size)
        share = self._train.share
        return StepShare(share.rows, share.factor, self.world_size * share.passes, share.totals)

    @property
    def has_users_batches(self) -> bool:
        """True if batches come from the user's LightningDataModule."""
        return self._train is None

    @property
    def averager(self) -> GradientAverager:
        """The gradient averager, while the Trainer fits."""
        assert self._averager is not None
        return self._averager

    def setup(self, trainer: Trainer) -> None:
        """Make step-wise schedulers count optimizer steps, not the shards' micro-batches."""
        super().setup(trainer)
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= self._shards.passes

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        with self._counted(self._train) as count:
            return count(super().training_step(*args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        with self._counted(self._validation) as count:
            return count(super().validation_step(*args, **kwargs))

    @property
    def _batch_share(self) -> tuple[int, float]:
        return (1, 1.0) if self._train is None else (self._train.share.rows, self.factor)

    @property
    def _learning_rate_scale(self) -> int:
        return self._shards.num_shards

    def _average_batch_norm(self) -> None:
        module = self.lightning_module
        if module is None or self._averager is None or module.trainer.sanity_checking:
            return
        outside_inference_mode(self._buffers.reduce)()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on each rank, because all ranks can access the store."""
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            checkpoint_path, weights_only=weights_only
        )
        return loaded

    @contextlib.contextmanager
    def _counted(
        self, loader: TrainLoader | ValidationLoader | None
    ) -> Iterator[Callable[[Any], Any]]:
        """Weight logged values by rows; yield a function that processes a step's output."""
        self._settle()
        self._current = loader
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        is_stand_in = self.has_no_rows

        def count(output: Any) -> Any:
            loss, stated = as_stated(output, "the step of the LightningModule")
            if stated is not None and isinstance(results, RankResults) and not is_stand_in:
                results.count_by(loss.detach(), stated)
            return output

        if isinstance(results, RankResults):
            results.logged_in_step.clear()
        if loader is None:
            yield count
            return
        if results is not None:
            results.batch_size = loader.share.rows
        if is_stand_in:
            callbacks: Any = module.trainer
            self._grown = [*_lists_of_modules(module), *_lists_of(_of_users(callbacks.callbacks))]
            with _no_trace(module, results), self._hinting():
                yield count
        else:
            with self._hinting():
                yield count

    @contextlib.contextmanager
    def _hinting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Exceptions have no notes in Python 3.10.
            if self._batch_hint and takes_tuple(error) and hasattr(error, "add_note"):
                error.add_note(self._batch_hint)
            raise

    def _rows_of(self, batch: Any) -> int:
        return super()._rows_of(batch) if self._current is None else self._current.share.rows

    def _settle(self) -> None:
        """Remove list entries that steps and hooks added for a batch without rows.

        A rank without any rows in the epoch retains the entries. Hooks would fail on empty lists,
        and their logged values do not count.
        """
        module = self.lightning_module
        results = None if module is None else module.trainer._results
        if isinstance(results, RankResults) and results.rows_of_epoch:
            for grown, length in self._grown:
                del grown[length:]
        self._grown = []


def _lists_of_modules(module: torch.nn.Module) -> Iterator[tuple[list[Any], int]]:
    return _lists_of(part for part in module.modules() if not isinstance(part, Metric))


def _of_users(callbacks: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's callbacks, without those of Lightning and this package."""
    for callback in callbacks:
        home = type(callback).__module__.partition(".")[0]
        if home not in ("lightning", "pytorch_lightning", "hvd_estimators"):
            yield callback


def _lists_of(owners: Iterable[Any]) -> Iterator[tuple[list[Any], int]]:
    """Yield each list in attributes, or nested in their lists and dicts, with its length."""
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        yield from _lists_in([v for v in attributes.values() if isinstance(v, (list, dict))], 2)


def _lists_in(values: Iterable[Any], depth: int) -> Iterator[tuple[list[Any], int]]:
    for value in values:
        if isinstance(value, list):
            yield value, len(value)
        if depth and isinstance(value, (list, dict)):
            inner = value.values() if isinstance(value, dict) else value
            yield from _lists_in([v for v in inner if isinstance(v, (list, dict))], depth - 1)


@contextlib.contextmanager
def _no_trace(module: LightningModule, results: ResultCollection | None) -> Iterator[None]:
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
