"""The callbacks that the trainer adds to the user's, and the list that calls them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.keras.averaging import StatisticsAverager, sum_arrays
from hvd_estimators.keras.checkpoint import callback_state, restore_callback
from hvd_estimators.keras.randomness import RandomStreams
from hvd_estimators.keras.shards import Turns
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.shards import ShardStates
from hvd_estimators.training.spec import EpochMetrics
from hvd_estimators.training.tensorboard import EventWriter

__all__ = [
    "EpochEnd",
    "ProgressReports",
    "RankCallbacks",
    "StatisticsCallback",
    "StreamsCallback",
]


class StreamsCallback(keras.callbacks.Callback):
    """Begins the random streams of each shard that the rank plays, in each epoch.

    Parameters
    ----------
    streams : RandomStreams
        The rank's.
    shards : ShardStates
        The shards.
    """

    def __init__(self, streams: RandomStreams, shards: ShardStates) -> None:
        super().__init__()
        self._streams = streams
        self._shards = shards

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin the streams of the epoch."""
        self._shards.for_each(lambda shard: self._streams.begin(shard, epoch))


class StatisticsCallback(keras.callbacks.Callback):
    """Averages the statistics of batch normalization before they are validated with or saved.

    Parameters
    ----------
    shards : ShardStates
        The shards that the rank plays.
    """

    def __init__(self, shards: ShardStates) -> None:
        super().__init__()
        self._shards = shards
        self._averager: StatisticsAverager | None = None
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember what the statistics are."""
        self._averager = StatisticsAverager(self.model)
        self._due = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Average what training has counted."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Average, where there was no validation."""
        self._average()

    def _average(self) -> None:
        if self._due and self._averager is not None:
            self._due = False
            self._averager.average(self._shards)


class ProgressReports(keras.callbacks.Callback):
    """Tells the driver how far the epoch is. Rank 0 only."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note when the epoch began."""
        self._progress.start_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report now and then what this rank has measured."""
        # Before the first batch nothing is measured, and metrics are not even built.
        if batch and self._progress.due:
            self._progress.step(batch, _scalars(self.model.get_metrics_result()))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the whole epoch."""
        self._progress.end_epoch(_scalars(logs or {}))


class EpochEnd(keras.callbacks.Callback):
    """Comes after all other callbacks: takes down an epoch, and lets ranks stop together.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's, on all ranks the same; their state is kept for a resumed run.
    history : sequence of EpochMetrics
        Epochs of an earlier part of the run.
    restored : sequence of mapping
        State of the callbacks after these.
    writer : EventWriter
        Writes the logs, where no callback of the user's does.
    progress : Progress
        Tells the driver.
    save : callable
        Called after each epoch, on all ranks, with the epochs, what gives the callbacks' states,
        and whether a callback has stopped training.

    Attributes
    ----------
    history : list of EpochMetrics
        All epochs so far.
    stop : bool
        Whether a callback of this rank has asked for a stop in the course of the epoch.
    stopped : bool
        Whether callbacks have stopped training.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        history: Sequence[EpochMetrics],
        restored: Sequence[Mapping[str, Any]],
        writer: EventWriter,
        progress: Progress,
        save: Callable[[tuple[EpochMetrics, ...], Callable[[], Sequence[Any]], bool], None],
    ) -> None:
        super().__init__()
        self.history = list(history)
        self._callbacks = callbacks
        self._restored = restored
        self._writer = writer
        self._progress = progress
        self._save = save
        self._own_tensorboard = any(
            isinstance(callback, keras.callbacks.TensorBoard) for callback in callbacks
        )
        self.stop = False
        self.stopped = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the callbacks, which have reset themselves just before."""
        for callback, state in zip(self._callbacks, self._restored, strict=False):
            restore_callback(callback, state)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Take down what was measured, agree on whether to stop, and save."""
        values = dict(logs or {})
        train = {name: v for name, v in values.items() if not name.startswith("val_")}
        validation = {
            name.removeprefix("val_"): v for name, v in values.items() if name.startswith("val_")
        }
        record = EpochMetrics(epoch, train, validation or None)
        self.history.append(record)
        self._progress.record(record)
        if not self._own_tensorboard:
            stages = {"train": train, "validation": validation}
            self._writer.scalars(
                epoch,
                {
                    f"{stage}/{name}": value
                    for stage, measured in stages.items()
                    for name, value in _scalars(measured).items()
                },
            )
        wanted = float(self.stop or self.model.stop_training)
        (ranks,) = sum_arrays([np.array(wanted)], "stop")
        self.model.stop_training = self.stopped = bool(ranks)
        self._save(
            tuple(self.history),
            lambda: list(map(callback_state, self._callbacks)),
            self.stopped,
        )


class RankCallbacks(keras.callbacks.CallbackList):
    """All callbacks of a rank.

    A callback that sets ``model.stop_training`` on some ranks only (because it looks at the rank's
    own batches, or at a clock) would leave the others waiting. So training stops at the end of an
    epoch, on all ranks, if any rank wants it to.

    Keras hands the logs of each batch, as numbers, to a thread of its own even if no callback takes
    them. Here they are left in TensorFlow then, which saves a good part of a small model's step.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        In the order in which they are called.
    end : EpochEnd
        The last one.
    model : keras.Model
        The model.
    epochs, steps : int
        Epochs of the run, steps of an epoch.
    turns : Turns
        Tells which batches make a step.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        end: EpochEnd,
        model: keras.Model,
        epochs: int,
        steps: int,
        turns: Turns,
    ) -> None:
        super().__init__(
            [*callbacks, end], add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
        )
        self._end = end
        self._turns = turns
        self._batch_ends = True

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks."""
        super().on_epoch_begin(epoch, logs)
        # Only now, since instances can be given other functions at any time.
        self._batch_ends = any(map(_takes_batch_ends, self.callbacks))

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, where a step begins."""
        step = self._turns.begin(batch)
        if step is not None:
            super().on_train_batch_begin(step, logs)
            self._put_stop_off()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, where a step ends, if any of them takes this."""
        step = self._turns.end(batch)
        if self._batch_ends and step is not None:
            if self._turns.passes > 1:
                # Those that Keras has may be of a batch without rows.
                logs = self.model.get_metrics_result()
            super().on_train_batch_end(step, logs)
            self._put_stop_off()

    def _put_stop_off(self) -> None:
        if self.model.stop_training:
            self._end.stop = True
            self.model.stop_training = False


def _takes_batch_ends(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False
    # Of the instance, which LambdaCallback and the like give functions of its own.
    return any(
        getattr(getattr(callback, name), "__func__", None)
        is not getattr(keras.callbacks.Callback, name)
        for name in ("on_train_batch_end", "on_batch_end")
    )


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
