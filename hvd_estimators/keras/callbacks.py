"""Callbacks for ``Model.fit`` on several ranks. Runs on the ranks."""

from __future__ import annotations

import difflib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import model_optimizers, rated_optimizers
from hvd_estimators.keras.collectives import broadcast_variables, current, exchange, sum_arrays
from hvd_estimators.keras.gradients import is_distributed
from hvd_estimators.keras.metrics import (
    as_logs,
    merge_states,
    metrics_with_merge_state,
    results,
    share_of,
    summed_variables,
)
from hvd_estimators.keras.shard_state import split_seed_states
from hvd_estimators.launch.service.events import log_to_driver

logger = logging.getLogger(__name__)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Callback for ``KerasEstimator(checkpoint_callback=...)`` that keeps the best model.

    The estimator sets the path of the file and returns the model from this file.

    Parameters
    ----------
    monitor : str
        Entry of the logs by which models are compared.
    verbose : int
        If 1, report every model that is saved.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better.
    save_freq : "epoch" or int
        When to compare models: after every epoch, or after this number of batches.
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
    """Start all ranks from one rank's weights and optimizer state, including slot variables.

    Random layers, such as dropout, draw different numbers on each rank. The callback also turns off
    ``jit_compile``, because XLA cannot compile the operations between ranks.

    Parameters
    ----------
    root_rank : int
        The rank whose state is broadcast.
    """

    def __init__(self, root_rank: int = 0) -> None:
        super().__init__()
        self._root_rank = root_rank

    def set_model(self, model: keras.Model) -> None:
        """Set the model and turn off ``jit_compile``, before its training function is created."""
        super().set_model(model)
        turn_off_jit_compile(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast the state; ``fit`` has built model and optimizer by now."""
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None and is_distributed(inner):
            raise ParamError(
                "optimizer: the ranks would skip different steps, since the averaging optimizer is "
                "inside a LossScaleOptimizer (which compile() puts around optimizers of "
                "mixed_float16 models). Compile with "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        states = [v for each in model_optimizers(self.model) for v in each.variables]
        broadcast_variables([*self.model.variables, *states], self._root_rank)
        split_seed_states(self.model, current().rank)


def turn_off_jit_compile(model: keras.Model) -> None:
    """Turn off XLA compilation of a model's training, with a warning if it was on."""
    if model.jit_compile:
        logger.warning(
            "jit_compile is turned off for training on several ranks: XLA cannot compile the "
            "operations between ranks. Compile the model with jit_compile=False to leave this out."
        )
        model.jit_compile = False


class LogCallback(keras.callbacks.Callback):
    """Report the start and end of every epoch to the driver's standard output.

    Replaces ``sparkdl.horovod.tensorflow.keras.LogCallback``. Only rank 0 sends its lines, so all
    ranks may have the callback. If it follows `MetricAverageCallback`, the logs cover the rows of
    all ranks.

    Parameters
    ----------
    per_batch_log : bool
        Whether to report every batch as well.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._per_batch_log = per_batch_log
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the start of an epoch."""
        self._epoch = epoch
        self._report(f"epoch {epoch} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the logs of a batch if ``per_batch_log`` is set."""
        if self._per_batch_log:
            self._report(f"epoch {self._epoch}, batch {batch}: {_numbers(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the logs of an epoch."""
        self._report(f"epoch {epoch} ends: {_numbers(logs)}")

    def _report(self, text: str) -> None:
        # Not current(): programs without other ranks need no collectives.
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            log_to_driver(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _numbers(logs: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={_plain_text(value)}" for name, value in (logs or {}).items())


def _plain_text(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError):
        return str(value)


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace an epoch's logs by metrics over the rows of all ranks.

    The callback sums the states of metrics (sums and counts) over the ranks and computes the
    results from the totals. The results are therefore exact for any numbers of rows per rank.

    Some states cannot be summed, such as a maximum. Such a metric needs one of the following:

    - A method ``merge_state(metrics)``, which merges the variables of the same metric on the other
      ranks.
    - Variables that declare their reduction: ``add_variable(aggregation="mean")``, or
      ``"only_first_replica"`` for rank 0's value.

    Other entries of the logs (from the user's own ``train_step``) are averaged over the ranks. An
    entry that equals the result of a metric with another name gets that metric's value instead.
    Place this callback before callbacks that read the logs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._train: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        # This rank's results, by their names in the epoch's logs.
        self._own: dict[str, Any] = {}
        # Metrics that a log entry has equalled in all epochs, by the entry's name.
        self._equal: dict[str, set[str]] = {}

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Forget the results of the previous epoch."""
        self._in_epoch = True
        self._train = self._validation = None
        self._own = {}

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Merge the training metrics, before validation resets them."""
        if self._in_epoch:
            self._train = self._measured("train")

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Merge the validation metrics."""
        if self._in_epoch:
            self._validation = self._measured("validation")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the merged metrics into the logs that other callbacks read."""
        self._in_epoch = False
        if logs is None:
            return
        train = self._train if self._train is not None else self._measured("train")
        measured = {
            **train,
            **{f"val_{name}": value for name, value in (self._validation or {}).items()},
        }
        others = {name: v for name, v in as_logs(logs).items() if name not in measured}
        for name, value in others.items():
            self._compare(name, value)
        other_logs = {
            name: (value, self._equal[name.removeprefix("val_")]) for name, value in others.items()
        }
        gathered = exchange.gather(other_logs, "hvd_estimators.logs")
        for name in sorted({name for logs_of_rank in gathered for name in logs_of_rank}):
            of_ranks = [logs_of_rank[name] for logs_of_rank in gathered if name in logs_of_rank]
            values = [value for value, _ in of_ranks]
            prefix = "val_" if name.startswith("val_") else ""
            same = set[str].intersection(*(metrics for _, metrics in of_ranks))
            same = {prefix + metric for metric in same} & set(measured)
            # Few rows may give several metrics the same result.
            chosen = max(sorted(same), key=functools.partial(_similarity, name), default=None)
            measured[name] = _mean(values) if chosen is None else measured[chosen]
        logs.update(measured)

    def _compare(self, name: str, value: Any) -> None:
        """Find the metrics whose result on this rank equals an entry of the logs."""
        prefix = "val_" if name.startswith("val_") else ""
        equal = {
            metric.removeprefix("val_")
            for metric, result in self._own.items()
            if metric.startswith("val_") == bool(prefix) and _are_close(result, value)
        }
        entry = name.removeprefix("val_")
        self._equal[entry] = self._equal.get(entry, equal) & equal

    def _measured(self, stage: str) -> dict[str, Any]:
        prefix = "val_" if stage == "validation" else ""
        # A log entry that equals one of these on all ranks gets the merged result instead.
        own_results = results(self.model, with_unused=True)
        self._own.update({prefix + name: value for name, value in own_results.items()})
        variables = summed_variables(self.model)
        shares = [share_of(variable, current().rank, current().size) for variable in variables]
        own = [v.numpy() * share for v, share in zip(variables, shares, strict=True)]
        for variable, total in zip(variables, sum_arrays(own, f"metrics_{stage}"), strict=True):
            variable.assign(total)
        merged = metrics_with_merge_state(self.model)
        if merged:
            states = [[variable.numpy() for variable in metric.variables] for metric in merged]
            ranks = exchange.gather(states, f"hvd_estimators.metrics_{stage}.merged")
            for metric, *of_ranks in zip(merged, *ranks, strict=True):
                merge_states(metric, of_ranks)
        return results(self.model)


def _are_close(result: Any, value: Any) -> bool:
    """Return whether two log entries are equal up to rounding, which differs in a graph."""
    a, b = np.asarray(result), np.asarray(value)
    if a.shape != b.shape or not {a.dtype.kind, b.dtype.kind} <= set("biuf"):
        return False
    return bool(np.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True))


def _similarity(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of the ranks' log entries; the first one if they cannot be averaged."""
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) > 1 or arrays[0].dtype.kind not in "biuf":
        return values[0]
    # The mean over a rank's last batch is NaN if the batch has no rows.
    return np.mean([a for a in arrays if not np.isnan(a).any()] or arrays, axis=0).tolist()


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
        # Set by the estimator's trainer: a resumed run keeps its original number of ranks.
        self.ranks: int | None = None

    def factor(self, epoch: float) -> float:
        """Return the fraction of the rate at a (fractional) epoch."""
        size = self.ranks or current().size
        return min(1.0, (epoch / self.warmup_epochs * (size - 1) + 1) / size)

    def _sets_rate(self, epoch: float) -> bool:
        # Sets the rate once more after the warm-up. Other callbacks may set it from then on.
        return epoch - 1.0 / (self.steps_per_epoch or 1) <= self.warmup_epochs


def _velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the running sums of steps of SGD, RMSprop and similar optimizers with momentum.

    The list is empty for other optimizers. Their momentum is an average of gradients, which does
    not contain the rate.
    """
    if not getattr(optimizer, "momentum", 0):
        return []
    return [variable for variable in optimizer.variables if variable.name.endswith("_momentum")]
