"""Callbacks for ``Model.fit`` on several ranks. Runs on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.exceptions import ParamError
from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.keras.collectives import broadcast_variables, current, exchange
from hvd_estimators.keras.gradients import is_distributed
from hvd_estimators.keras.metrics import as_logs, capture_metrics, merge_captured, results
from hvd_estimators.keras.shard_state import split_seed_states

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
    save_weights_only : bool
        Must be False, because the file has the whole model.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better.
    save_freq : "epoch" or int
        When to compare models: after every epoch, or after this number of batches. After a batch,
        ``monitor`` must be a value of training, of which the first rank's rows count.

    Raises
    ------
    ParamError
        If models cannot be compared at that time.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        if save_weights_only:
            raise ParamError(
                "save_weights_only: found True, and the best model is read whole. Leave it out."
            )
        if save_freq != "epoch" and monitor.startswith("val_"):
            raise ParamError(
                f"save_freq: found {save_freq!r}, and {monitor!r} is measured at the end of an "
                "epoch. Set save_freq='epoch', or monitor to a value of training, such as 'loss'."
            )
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
        self._sent = 0

    def set_model(self, model: keras.Model) -> None:
        """Set the model and turn off ``jit_compile``, before its training function is created."""
        super().set_model(model)
        turn_off_jit_compile(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast the state that exists; the first batch may build more."""
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None and is_distributed(inner):
            raise ParamError(
                "optimizer: the ranks would skip different steps, since the averaging optimizer is "
                "inside a LossScaleOptimizer (which compile() puts around optimizers of "
                "mixed_float16 models). Compile with "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        self._broadcast()

    # Keras would wait for the logs of each batch if it called a method at the batch's end.
    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Broadcast the state once more if a batch has built a part of the model."""
        if len(self.model.variables) > self._sent:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Do the same after an epoch of one batch."""
        self.on_train_batch_begin(0)

    def _broadcast(self) -> None:
        self._sent = len(self.model.variables)
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


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace an epoch's logs by metrics over the rows of all ranks.

    The callback sums the states of metrics (sums and counts) over the ranks and computes the
    results from the totals. The results are therefore exact for any numbers of rows per rank.

    Variables that are no sums declare their reduction: ``add_variable(aggregation="mean")``, or
    ``"only_first_replica"`` for rank 0's value.

    Other entries of the logs (from the user's own ``train_step``) are averaged over the ranks.
    Place this callback before callbacks that read the logs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_epoch = False
        self._train: dict[str, Any] | None = None
        self._validation: dict[str, Any] | None = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Forget the results of the previous epoch."""
        self._in_epoch = True
        self._train = self._validation = None

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
        gathered = exchange.gather(others, "hvd_estimators.logs")
        for name in sorted({name for logs_of_rank in gathered for name in logs_of_rank}):
            measured[name] = _mean([of_rank[name] for of_rank in gathered if name in of_rank])
        logs.update(measured)

    def _measured(self, stage: str) -> dict[str, Any]:
        states = exchange.gather(capture_metrics(self.model), f"hvd_estimators.metrics_{stage}")
        merge_captured(self.model, states)
        return results(self.model)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of the ranks' log entries; the first one if they cannot be averaged."""
    arrays = [np.asarray(value) for value in values]
    if len({array.shape for array in arrays}) > 1 or arrays[0].dtype.kind not in "biuf":
        return values[0]
    # The mean over a rank's last batch is NaN if the batch has no rows.
    return np.mean([a for a in arrays if not np.isnan(a).any()] or arrays, axis=0).tolist()
