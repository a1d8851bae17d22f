"""Callbacks for ``Model.fit`` on several ranks. Run on the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.averaging import broadcast_variables, sum_arrays
from hvd_estimators.keras.optimizer import is_distributed
from hvd_estimators.keras.randomness import split_seed_states

__all__ = [
    "BestModelCheckpoint",
    "BroadcastCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

logger = logging.getLogger(__name__)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps the best model, by what is monitored; for ``KerasEstimator(checkpoint_callback=...)``.

    The estimator decides where the file lies, and returns the model that was kept.

    Parameters
    ----------
    monitor : str
        Entry of the logs that tells which model is better.
    verbose : int
        1 tells of every model that is kept.
    mode : {"auto", "min", "max"}
        Whether less or more is better.
    save_freq : "epoch" or int
        When the model is looked at: after every epoch, or so many batches.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
        )


class BroadcastCallback(keras.callbacks.Callback):
    """Starts all ranks from one rank's weights and optimizer state (its slots included).

    Random layers, such as dropout, draw other numbers on each rank.
    Also turns off ``jit_compile``, since XLA cannot compile Horovod's operations.

    Parameters
    ----------
    root_rank : int
        The rank whose state the others take.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank

    def set_model(self, model: keras.Model) -> None:
        """Take the model, before its training function is made."""
        super().set_model(model)
        turn_off_jit_compile(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast; by now ``fit`` has built model and optimizer."""
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None and is_distributed(inner):
            raise ParamError(
                "optimizer: the ranks would skip different steps, since the averaging optimizer is "
                "inside a LossScaleOptimizer (which compile() puts around optimizers of "
                "mixed_float16 models). Compile with "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        broadcast_variables([*self.model.variables, *optimizer.variables], self._root_rank)
        split_seed_states(self.model, hvd.rank())


def turn_off_jit_compile(model: keras.Model) -> None:
    """Make sure that XLA does not compile a model's training, and say so where it would have."""
    if model.jit_compile:
        logger.warning(
            "jit_compile is turned off for training on several ranks: Horovod's operations cannot "
            "be compiled by XLA. Compile the model with jit_compile=False to leave this out."
        )
        model.jit_compile = False


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces an epoch's logs by what was measured over the rows of all ranks.

    Metrics are not averaged: their state (sums and counts) is added up over the ranks, and the
    result computed from that, so that it is exact whatever the ranks' numbers of rows. Logs that
    are no metrics (of a ``train_step`` of the user's) are averaged. Has to come before callbacks
    that read the logs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._train: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Forget the epoch before."""
        self._in_epoch = True
        self._train = self._validation = None

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Take what training measured, before validation resets it."""
        if self._in_epoch:
            self._train = self._measured("train")

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Take what validation measured."""
        if self._in_epoch:
            self._validation = self._measured("validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put both into the logs that other callbacks see."""
        self._in_epoch = False
        if logs is None:
            return
        train = self._train if self._train is not None else self._measured("train")
        measured = {
            **train,
            **{f"val_{name}": value for name, value in (self._validation or {}).items()},
        }
        others = {name: value for name, value in logs.items() if name not in measured}
        gathered = hvd.allgather_object(others, name="hvd_estimators.logs")
        for name in sorted({name for found in gathered for name in found}):
            values = [found[name] for found in gathered if name in found]
            measured[name] = sum(values) / len(values)
        logs.update(measured)

    def _measured(self, stage: str) -> dict[str, Any]:
        variables = self.model.metrics_variables
        shares = [_share(variable) for variable in variables]
        own = [v.numpy() * share for v, share in zip(variables, shares, strict=True)]
        for variable, total in zip(variables, sum_arrays(own, f"metrics_{stage}"), strict=True):
            variable.assign(total)
        results = self.model.get_metrics_result()
        return {name: np.asarray(value).tolist() for name, value in results.items()}


def _share(variable: Any) -> float:
    """Return what a variable of this rank is multiplied by before the ranks' are added up."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return 1.0
    if aggregation == "mean":
        return 1.0 / hvd.size()
    return float(hvd.rank() == 0)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to a multiple of the initial one.

    Parameters
    ----------
    initial_lr : float, optional
        The rate that is multiplied. Default: the optimizer's when training begins.
    multiplier : float or callable
        The factor, or ``multiplier(epoch)`` that returns it.
    start_epoch, end_epoch : int
        The epochs in which the rate is set, the last one excluded; None for no end.
    staircase : bool
        Set the rate once per epoch; otherwise before every batch, with fractions of epochs.
    steps_per_epoch : int, optional
        Batches of an epoch. Default: what ``fit`` was told.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Take down the initial rate and the number of batches."""
        if self.initial_lr is None:
            self.initial_lr = float(self.model.optimizer.learning_rate)
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ParamError("steps_per_epoch is not known. Set steps_per_epoch.")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the rate of the epoch."""
        self.current_epoch = epoch
        if self.staircase:
            self._set_rate(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the rate of the batch."""
        if not self.staircase and self.steps_per_epoch:
            self._set_rate(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs."""
        if logs is not None:
            logs["learning_rate"] = float(self.model.optimizer.learning_rate)

    def factor(self, epoch: float) -> float:
        """Return what the initial rate is multiplied by."""
        return self.multiplier(epoch) if callable(self.multiplier) else self.multiplier

    def _set_rate(self, epoch: float) -> None:
        assert self.initial_lr is not None
        if self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch):
            self.model.optimizer.learning_rate = self.initial_lr * self.factor(epoch)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all ranks, batch by batch.

    Many ranks make a large global batch, which takes a rate multiplied by their number, but not
    from the first step on (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2). The
    rate goes linearly from ``initial_lr / ranks`` to ``initial_lr``. In a `KerasEstimator` leave
    ``initial_lr`` out: the estimator multiplies what the callback sets.

    Parameters
    ----------
    initial_lr : float, optional
        The rate at the end of the warm-up. Default: the optimizer's when training begins.
    warmup_epochs : float
        Length of the warm-up.
    steps_per_epoch : int, optional
        Batches of an epoch. Default: what ``fit`` was told.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(initial_lr, staircase=False, steps_per_epoch=steps_per_epoch)
        self.warmup_epochs = warmup_epochs

    def factor(self, epoch: float) -> float:
        """Return the fraction of the rate at a (fractional) epoch."""
        size = hvd.size()
        return min(1.0, (epoch / self.warmup_epochs * (size - 1) + 1) / size)

    def _set_rate(self, epoch: float) -> None:
        assert self.initial_lr is not None
        # Once more after its end, and then others may set the rate.
        if epoch - 1.0 / (self.steps_per_epoch or 1) <= self.warmup_epochs:
            self.model.optimizer.learning_rate = self.initial_lr * self.factor(epoch)
