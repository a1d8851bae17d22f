"""The callbacks that the trainer adds to the user's, and the list that calls them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import keras

from hvd_estimators.keras.averaging import StatisticsAverager
from hvd_estimators.keras.ends import EpochEnd, StepEnd, scalars
from hvd_estimators.keras.randomness import RandomStreams
from hvd_estimators.keras.shards import Turns
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.shards import ShardStates

__all__ = [
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
    """Reduces the variables that layers compute, before a validation and before they are saved.

    Parameters
    ----------
    shards : ShardStates
        The shards that the rank plays.
    reductions : mapping
        The value of ``buffer_reduction``.
    """

    def __init__(self, shards: ShardStates, reductions: Mapping[str, str]) -> None:
        super().__init__()
        self._shards = shards
        self._reductions = reductions
        self._averager: StatisticsAverager | None = None
        self._due = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember what the statistics are."""
        self._averager = StatisticsAverager(self.model, self._reductions)
        self._due = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Average what training has counted."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Average, where there was no validation."""
        self._average()

    @property
    def digests(self) -> list[bytes]:
        """What the statistics were when the epoch began, see `StatisticsAverager`."""
        return [] if self._averager is None else self._averager.digests

    @property
    def bases(self) -> dict[int, Any]:
        """Summed variables when the epoch began, see `StatisticsAverager`."""
        return {} if self._averager is None else self._averager.bases

    def put_back(self, digests: Sequence[bytes], bases: Mapping[int, Any]) -> None:
        """Resume within an epoch that had begun with these statistics."""
        assert self._averager is not None
        self._averager.digests = list(digests)
        self._averager.bases.update(bases)

    def _average(self) -> None:
        if self._due and self._averager is not None:
            self._due = False
            self._averager.average(self._shards)


class ProgressReports(keras.callbacks.Callback):
    """Tells the driver how far the epoch is. Rank 0 only.

    Parameters
    ----------
    progress : Progress
        Sends it.
    done : int
        Steps that the first epoch has behind it, in an earlier part of the run.
    """

    def __init__(self, progress: Progress, done: int = 0) -> None:
        super().__init__()
        self._progress = progress
        self._done = done

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note when the epoch began."""
        self._progress.start_epoch(epoch, self._done)
        self._done = 0

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report now and then what this rank has measured."""
        # Before the first batch nothing is measured, and metrics are not even built.
        if batch and self._progress.due:
            self._progress.step(batch, scalars(self.model.get_metrics_result()))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the whole epoch."""
        self._progress.end_epoch(scalars(logs or {}))


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
    statistics : StatisticsCallback, optional
        One of the callbacks.
    step_end : StepEnd, optional
        Called after each step, after all callbacks.
    resumed : Resumed, optional
        Goes on within the first epoch.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        end: EpochEnd,
        model: keras.Model,
        epochs: int,
        steps: int,
        turns: Turns,
        statistics: StatisticsCallback | None = None,
        step_end: StepEnd | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        super().__init__(
            [*callbacks, end], add_history=True, model=model, epochs=epochs, steps=steps, verbose=0
        )
        self._end = end
        self._turns = turns
        self._statistics = statistics
        self._step_end = step_end
        self._looks = step_end is not None and step_end.looks
        self._resumed = resumed
        # Batches of the epoch that an earlier part of the run has trained on.
        self._skipped = 0
        self._batch_ends = True
        self._epoch = self._done = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks; by now there is the training function."""
        super().on_train_begin(logs)
        if self._resumed is not None:
            self._resumed.skip(self.model.steps_per_execution)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks."""
        super().on_epoch_begin(epoch, logs)
        resumed, self._resumed = self._resumed, None
        self._skipped = 0
        if resumed is not None:
            self._skipped = resumed.batches
            resumed.restore(self)
        self._epoch, self._done = epoch, self._skipped // self._turns.passes
        # Only now, since instances can be given other functions at any time.
        self._batch_ends = any(map(_takes_batch_ends, self.callbacks))

    def put_back(self, digests: Sequence[bytes], bases: Mapping[int, Any], stop: bool) -> None:
        """Go on within an epoch: give callbacks their states back."""
        if self._statistics is not None:
            self._statistics.put_back(digests, bases)
        self._end.put_back(stop)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, where a step begins."""
        if batch < self._skipped:
            return
        step = self._turns.begin(batch)
        if step is not None:
            super().on_train_batch_begin(step, logs)
            self._put_stop_off()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, where a step ends, if any of them takes this."""
        if batch < self._skipped:
            return
        step = self._turns.end(batch)
        if step is None:
            return
        if self._turns.passes > 1 and (self._looks or self._batch_ends):
            # Those that Keras has may be of a batch without rows.
            logs = self.model.get_metrics_result()
        if self._looks and self._step_end is not None:
            # A callback may raise an error of its own for it, on one rank only.
            self._step_end.look(self.model, self._epoch, step + 1, logs or {})
        if self._batch_ends and self._turns.is_told(step):
            super().on_train_batch_end(step, logs)
            self._put_stop_off()
        if self._step_end is not None:
            before, self._done = self._done, step + 1
            self._step_end.finish(self._epoch, before, step + 1)

    def _put_stop_off(self) -> None:
        if self.model.stop_training:
            self._end.stop = True
            self.model.stop_training = False


class Resumed(Protocol):
    """What goes on within an epoch."""

    @property
    def batches(self) -> int:
        """Batches of this rank that are done."""

    def skip(self, batches_per_call: int) -> None:
        """Let the training function do nothing for these."""

    def restore(self, callbacks: RankCallbacks) -> None:
        """Put back what had happened, now that the epoch has begun."""


def _takes_batch_ends(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False
    # Of the instance, which LambdaCallback and the like give functions of its own.
    return any(
        getattr(getattr(callback, name), "__func__", None)
        is not getattr(keras.callbacks.Callback, name)
        for name in ("on_train_batch_end", "on_batch_end")
    )
