"""Callbacks for ``Model.fit`` on several ranks. Run on the worker."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.averaging import broadcast_variables, sum_arrays
from hvd_estimators.keras.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvd_estimators.keras.metric_states import added_variables, merge_states, merged_metrics
from hvd_estimators.keras.objects import exchange
from hvd_estimators.keras.optimizer import is_distributed
from hvd_estimators.keras.randomness import split_seed_states
from hvd_estimators.launch.events.messages import log_to_driver

__all__ = [
    "BestModelCheckpoint",
    "BroadcastCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LogCallback",
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


class LogCallback(keras.callbacks.Callback):
    """Tells the driver's standard output of every epoch that begins and ends, while ranks train.

    Takes the place of ``sparkdl.horovod.tensorflow.keras.LogCallback``. Only rank 0 sends its
    lines, so that it may be a callback of all ranks; where it comes after `MetricAverageCallback`
    the logs are those of the rows of all ranks.

    Parameters
    ----------
    per_batch_log : bool
        Whether to tell of every batch as well.
    """

    def __init__(self, per_batch_log: bool = False) -> None:
        super().__init__()
        self._per_batch_log = per_batch_log
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell that an epoch begins."""
        self._epoch = epoch
        self._tell(f"epoch {epoch} begins")

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell of a batch, if each is to be told of."""
        if self._per_batch_log:
            self._tell(f"epoch {self._epoch}, batch {batch}: {_numbers(logs)}")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell what was measured in an epoch."""
        self._tell(f"epoch {epoch} ends: {_numbers(logs)}")

    def _tell(self, text: str) -> None:
        # Keras may run on torch, whose Horovod is another one.
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
    """Replaces an epoch's logs by what was measured over the rows of all ranks.

    Metrics are not averaged: their state (sums and counts) is added up over the ranks, and the
    result computed from that, so that it is exact whatever the ranks' numbers of rows. A metric
    whose state cannot be added (a maximum) has a method ``merge_state(metrics)``, which takes in
    the variables of other metrics of its kind, those of the other ranks; or its variables say how
    they are reduced: ``add_variable(aggregation="mean")``, or ``"only_first_replica"`` for rank
    0's. Logs that are no metrics (of a ``train_step`` of the user's) are averaged, unless they are
    the mean of a metric by another name. Has to come before callbacks that read the logs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._train: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None
        # This rank's means, by the names of their metrics in the epoch's logs.
        self._means: dict[str, Any] = {}

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Forget the epoch before."""
        self._in_epoch = True
        self._train = self._validation = None
        self._means = {}

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
        others = {
            name: (value, self._metrics_with(name, value))
            for name, value in logs.items()
            if name not in measured
        }
        gathered = exchange.gather(others, "hvd_estimators.logs")
        for name in sorted({name for found in gathered for name in found}):
            of_ranks = [found[name] for found in gathered if name in found]
            values = [value for value, _ in of_ranks]
            same = sorted(set(measured).intersection(*(metrics for _, metrics in of_ranks)))
            measured[name] = measured[same[0]] if same else sum(values) / len(values)
        logs.update(measured)

    def _metrics_with(self, name: str, value: Any) -> set[str]:
        """Return the names of the metrics whose mean on this rank an entry of the logs is."""
        is_of_validation = name.startswith("val_")
        return {
            metric
            for metric, mean in self._means.items()
            if mean == value and metric.startswith("val_") == is_of_validation
        }

    def _measured(self, stage: str) -> dict[str, Any]:
        prefix = "val_" if stage == "validation" else ""
        for metric in self.model.metrics:
            # Where all ranks have the same mean, it is also theirs together.
            if isinstance(metric, keras.metrics.Mean):
                self._means[prefix + metric.name] = _plain(metric.result())
        variables = added_variables(self.model)
        shares = [_share(variable) for variable in variables]
        own = [v.numpy() * share for v, share in zip(variables, shares, strict=True)]
        for variable, total in zip(variables, sum_arrays(own, f"metrics_{stage}"), strict=True):
            variable.assign(total)
        merged = merged_metrics(self.model)
        if merged:
            states = [[variable.numpy() for variable in metric.variables] for metric in merged]
            ranks = exchange.gather(states, f"hvd_estimators.metrics_{stage}.merged")
            for metric, *of_ranks in zip(merged, *ranks, strict=True):
                merge_states(metric, of_ranks)
        results = self.model.get_metrics_result()
        return {name: _plain(value) for name, value in results.items()}


def _plain(value: Any) -> Any:
    array = keras.ops.convert_to_numpy(value)
    # bfloat16 is no type of NumPy's own.
    return (array if array.dtype.kind in "biuf" else array.astype(np.float64)).tolist()


def _share(variable: Any) -> float:
    """Return what a variable of this rank is multiplied by before the ranks' are added up."""
    aggregation = getattr(variable, "aggregation", "sum")
    if aggregation == "sum":
        return 1.0
    if aggregation == "mean":
        return 1.0 / hvd.size()
    return float(hvd.rank() == 0)
