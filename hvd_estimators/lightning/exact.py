"""The estimator's strategy: ranks with unequal batches train and measure as one process would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torchmetrics import Metric

from hvd_estimators.lightning.averaging import BackwardAverager
from hvd_estimators.lightning.bases import ResultCollection
from hvd_estimators.lightning.collectives import outside_inference_mode
from hvd_estimators.lightning.loaders import TrainLoader, ValidationLoader
from hvd_estimators.lightning.strategy import HorovodStrategy
from hvd_estimators.torch.shards import average_shards
from hvd_estimators.training.shards import ShardStates

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["ExactStrategy"]


class ExactStrategy(HorovodStrategy):
    """Weights gradients and logged values by what each rank's batch counts for.

    The gradient of a step is that of the mean over the rows of all ranks. What is logged counts by
    rows, and a rank that has no rows in a step takes part without leaving a trace.

    Parameters
    ----------
    train, validation : loader, optional
        Tell what their batches count for; without one, batches count for the same.
    shards : ShardStates
        The canonical shards, of which the rank plays one or several.
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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._shards = shards
        self._train = train
        self._validation = validation
        self._counting: TrainLoader | ValidationLoader | None = None

    @property
    def factor(self) -> float:
        """What weights this rank's gradient in the current step."""
        return 1.0 if self._train is None else self._train.share.factor

    @property
    def has_no_rows(self) -> bool:
        """Whether the rank has no rows in the current step, whose results leave no trace."""
        return self._counting is not None and self._counting.share.is_stand_in

    @property
    def averager(self) -> BackwardAverager:
        """What averages gradients, while the Trainer fits."""
        assert self._averager is not None
        return self._averager

    def setup(self, trainer: Trainer) -> None:
        """Count steps, not the batches of several shards, where schedulers follow steps."""
        super().setup(trainer)
        for config in self.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= self._shards.passes

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        with self._counted(self._train):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        with self._counted(self._validation):
            return super().validation_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute gradients, weighted by what the rank's batch counts for."""
        factor = self.factor
        loss = closure_loss if factor == 1.0 else closure_loss * factor
        return super().backward(loss, optimizer, *args, **kwargs)

    @property
    def _learning_rate_scale(self) -> int:
        return self._shards.num_shards

    def _average_batch_norm(self) -> None:
        if self.lightning_module is not None and self._averager is not None:
            outside_inference_mode(average_shards)(self.lightning_module, self._shards)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, on each rank by itself: the store is one that all ranks see."""
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            checkpoint_path, weights_only=weights_only
        )
        return loaded

    @contextlib.contextmanager
    def _counted(self, loader: TrainLoader | ValidationLoader | None) -> Iterator[None]:
        if loader is None:
            yield
            return
        module = self.lightning_module
        assert module is not None
        results = module.trainer._results
        if results is not None:
            results.batch_size = loader.share.rows
        self._counting = loader
        try:
            if loader.share.is_stand_in:
                with _no_trace(module, results):
                    yield
            else:
                yield
        finally:
            self._counting = None


@contextlib.contextmanager
def _no_trace(module: LightningModule, results: ResultCollection | None) -> Iterator[None]:
    """Undo what a step does to logged values, metrics and buffers."""
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
        # Past autograd: the backward pass, whose gradients count zero, is still to come.
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
            # Logged for the first time: it stays, with the value of no rows.
            metric.reset()
            metric.has_reset = False
