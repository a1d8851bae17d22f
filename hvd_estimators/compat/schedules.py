"""Horovod's learning rate schedules as callbacks for Keras 3. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import rated_optimizers
from hvd_estimators.keras.collectives import current


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to a multiple of the initial one.

    By default, each optimizer of a `keras.optimizers.MultiOptimizer` gets the multiple of
    the optimizer's own initial rate.

    Parameters
    ----------
    initial_lr : float, optional
        The rate to multiply. Default: the optimizer's rate when training begins.
    multiplier : float or callable
        The factor, or a function ``multiplier(epoch)`` that returns it.
    start_epoch, end_epoch : int
        The epochs in which the rate is set. ``end_epoch`` is excluded; None means no end.
    staircase : bool
        If True, set the rate once per epoch. Otherwise set it before every batch, with fractions of
        epochs.
    momentum_correction : bool
        When the rate changes, multiply the velocity of optimizers with momentum by new rate / old
        rate. The velocity consists of steps at the old rate (Goyal et al., "Accurate, Large
        Minibatch SGD", 2017, section 3, remark 2).
    steps_per_epoch : int, optional
        Batches per epoch. Default: the value from ``fit``.
    verbose : int
        If 1, rank 0 prints the rate after each epoch that changed it.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] = 1.0,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        self.initial_lr: float | list[float] | None = initial_lr
        self.multiplier = multiplier
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.verbose = verbose
        self.current_epoch = 0
        self._has_changed = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Record the initial rates and the number of batches."""
        if self.initial_lr is None:
            self.initial_lr = self._rates()
        if not self.staircase and self.steps_per_epoch is None:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ParamError("steps_per_epoch is not known. Set steps_per_epoch.")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the epoch's rate if ``staircase`` is set."""
        self.current_epoch = epoch
        self._has_changed = False
        if self.staircase:
            self._set_rate(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the batch's rate if ``staircase`` is not set."""
        if not self.staircase and self.steps_per_epoch:
            self._set_rate(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs: ``learning_rate``, or ``learning_rate_0`` and so on."""
        rates = self._rates()
        if logs is not None:
            names = [f"learning_rate_{number}" for number in range(len(rates))]
            logs.update(zip(names if len(rates) > 1 else ["learning_rate"], rates, strict=True))
        if self.verbose and self._has_changed and current().rank == 0:
            text = ", ".join(f"{rate:g}" for rate in rates)
            print(f"\nEpoch {epoch + 1}: learning rate set to {text}.", flush=True)

    def factor(self, epoch: float) -> float:
        """Return the factor for the initial rate."""
        return self.multiplier(epoch) if callable(self.multiplier) else self.multiplier

    def _rates(self) -> list[float]:
        return [float(optimizer.learning_rate) for optimizer in rated_optimizers(self.model)]

    def _sets_rate(self, epoch: float) -> bool:
        return self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def _set_rate(self, epoch: float) -> None:
        if not self._sets_rate(epoch):
            return
        optimizers, factor = rated_optimizers(self.model), self.factor(epoch)
        initial = self.initial_lr
        assert initial is not None
        initials = initial if isinstance(initial, list) else [initial] * len(optimizers)
        for optimizer, given in zip(optimizers, initials, strict=True):
            old = float(optimizer.learning_rate)
            optimizer.learning_rate = given * factor
            new = float(optimizer.learning_rate)
            if new == old:
                continue
            self._has_changed = True
            if self.momentum_correction and old:
                for velocity in _velocities(optimizer):
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate batch by batch, from one rank's rate to the rate of all ranks.

    Many ranks make a large global batch, which needs a rate multiplied by the number of ranks. The
    first steps need a smaller rate (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section
    2.2). The rate rises linearly from ``initial_lr / ranks`` to ``initial_lr``. In a
    `KerasEstimator`, leave ``initial_lr`` out: the estimator multiplies the callback's rate.

    Parameters
    ----------
    initial_lr : float, optional
        The rate at the end of the warm-up. Default: the optimizer's rate when training begins.
    warmup_epochs : float
        Length of the warm-up.
    momentum_correction, steps_per_epoch, verbose
        See `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
            verbose=verbose,
        )
        self.warmup_epochs = warmup_epochs

    def factor(self, epoch: float) -> float:
        """Return the fraction of the rate at a (fractional) epoch."""
        # An estimator's resumed run keeps its original number of ranks.
        size = (self.params or {}).get("ranks") or current().size
        return min(1.0, (epoch / self.warmup_epochs * (size - 1) + 1) / size)

    def _sets_rate(self, epoch: float) -> bool:
        # Sets the rate once more after the warm-up. Other callbacks may set it from then on.
        is_over = epoch - 1.0 / (self.steps_per_epoch or 1) > self.warmup_epochs
        return self.warmup_epochs > 0 and not is_over


def _velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the running sums of steps of SGD, RMSprop and similar optimizers with momentum.

    The list is empty for other optimizers. Their momentum is an average of gradients, which does
    not contain the rate.
    """
    if not getattr(optimizer, "momentum", 0):
        return []
    return [variable for variable in optimizer.variables if variable.name.endswith("_momentum")]
