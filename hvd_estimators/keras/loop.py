"""The training loop around ``fit``: callbacks at the ends of steps and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from hvd_estimators.keras.callback_states import CallbackStates
from hvd_estimators.keras.collectives import StatisticsAverager, sum_arrays
from hvd_estimators.keras.shard_state import RandomStreams, Turns
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.training.nan_check import NanCheck
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import EpochMetrics, TrainSpec
from hvd_estimators.training.step_control import LongValidation, StopRequest, interrupted
from hvd_estimators.training.tensorboard import EventWriter

__all__ = [
    "EpochEnd",
    "NotFinite",
    "ProgressReports",
    "RankCallbacks",
    "StatisticsCallback",
    "StepEnd",
    "StreamsCallback",
    "scalars",
]


class NotFinite:
    """Looks at a model's loss and at what it trains.

    Parameters
    ----------
    model : keras.Model
        Built.
    """

    def __init__(self, model: keras.Model) -> None:
        self._variables = [
            variable
            for variable in model.trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # One call for all, of which nothing but a flag is read where all is well.
        self._are_finite = tf.function(self._all_finite)

    def after_step(self, logs: Mapping[str, Any]) -> tuple[float | None, list[str]]:
        """Return the loss if it is NaN or infinite, and the paths of such variables.

        Parameters
        ----------
        logs : mapping
            What the step has returned. Its loss is the mean of the epoch so far, which a single
            loss that is not finite makes so, too.
        """
        loss = logs.get("loss")
        value = None if loss is None or np.ndim(loss) else float(loss)
        found = None if value is None or np.isfinite(value) else value
        if not self._variables or bool(self._are_finite()):
            return found, []
        return found, [v.path for v in self._variables if not bool(_is_finite(v))]

    def _all_finite(self) -> tf.Tensor:
        return tf.reduce_all(tf.stack(list(map(_is_finite, self._variables))))


def _is_finite(variable: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(variable)))


class StepEnd:
    """Looks for NaN, saves the run within an epoch, and ends it where that is asked for.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    save : callable
        Called with epochs and batches of the next one that are done, on all ranks.
    stop_request : StopRequest
        Tells whether ranks are asked to end.
    finite : NanCheck
        Lets ranks agree on what is not finite.
    long_validation : LongValidation
        Tells whether to save before validation.
    """

    def __init__(
        self,
        spec: TrainSpec,
        save: Callable[[int, int], None],
        stop_request: StopRequest,
        finite: NanCheck,
        long_validation: LongValidation,
    ) -> None:
        self.long_validation = long_validation
        self._spec = spec
        self._save = save
        self._stop_request = stop_request
        self._finite = finite
        self._not_finite: NotFinite | None = None
        self._batches = spec.data.train_steps_per_epoch
        self._passes = spec.backward_passes_per_step

    @property
    def looks(self) -> bool:
        """Whether each step's logs are to be looked at."""
        return self._spec.terminate_on_nan

    def look(self, model: keras.Model, epoch: int, batches: int, logs: Mapping[str, Any]) -> None:
        """End training on all ranks if something was not finite in a step.

        Parameters
        ----------
        model : keras.Model
            The model.
        epoch : int
            The epoch, from 0.
        batches : int
            Batches of a shard that are done in it.
        logs : mapping
            What was measured in the epoch so far.
        """
        if not self._is_step(batches):
            return
        if self._not_finite is None:
            self._not_finite = NotFinite(model)
        found = self._not_finite.after_step(logs)
        self._finite.after_step(self._spec.steps_done(epoch, batches), epoch, *found)

    def finish(self, epoch: int, before: int, batches: int) -> None:
        """Save the run where that is due, or where it is to end here.

        An epoch's last step has its end for that.

        Parameters
        ----------
        epoch : int
            The epoch, from 0.
        before, batches : int
            Batches of a shard that were done when callbacks were last told, and that are now.
        """
        made_progress()
        if batches >= self._batches or not self._is_step(batches):
            return
        is_asked = self._stop_request.after_step()
        if is_asked or self._is_due(epoch, before, batches):
            self._save(epoch, batches)
        if is_asked:
            raise interrupted(epoch, batches, self._spec.run.checkpoints_path is not None)

    def finish_epoch(self, epoch: int) -> None:
        """End training after an epoch that another one is to follow, where that is asked for."""
        if epoch + 1 < self._spec.epochs and self._stop_request.after_step():
            raise interrupted(epoch + 1, 0, self._spec.run.checkpoints_path is not None)

    def _is_step(self, batches: int) -> bool:
        return not batches % self._passes or batches >= self._batches

    def _is_due(self, epoch: int, before: int, batches: int) -> bool:
        """Return whether a checkpoint was due after any of the steps of one call."""
        spec, whole = self._spec, before - before % self._passes
        steps = range(spec.steps_done(epoch, whole), spec.steps_done(epoch, batches))
        return self.long_validation.is_due(spec.steps_left(batches), len(steps)) or any(
            spec.checkpoints.due_after(step + 1) for step in steps
        )


class EpochEnd(keras.callbacks.Callback):
    """Comes after all other callbacks: takes down an epoch, and lets ranks stop together.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's, on all ranks the same.
    history : sequence of EpochMetrics
        Epochs of an earlier part of the run.
    states : CallbackStates
        Gives the callbacks of a run that goes on their states back.
    writer : EventWriter
        Writes the logs, where no callback of the user's does.
    progress : Progress
        Tells the driver.
    save : callable
        Called after each epoch, on all ranks, with the number of epochs that are done.
    step_end : StepEnd
        Ends training after an epoch where that is asked for.

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
        states: CallbackStates,
        writer: EventWriter,
        progress: Progress,
        save: Callable[[int], None],
        step_end: StepEnd,
    ) -> None:
        super().__init__()
        self.history = list(history)
        self._states = states
        self._writer = writer
        self._progress = progress
        self._save = save
        self._step_end = step_end
        self._own_tensorboard = any(
            isinstance(callback, keras.callbacks.TensorBoard) for callback in callbacks
        )
        self.stop = False
        self.stopped = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the callbacks, which have reset themselves just before."""
        self._states.restore()

    def put_back(self, stop: bool) -> None:
        """Go on within an epoch, which callbacks have just begun."""
        self._states.restore()
        self.stop = stop

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Note that validation begins."""
        self._step_end.long_validation.begin()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Agree on whether it was a long one."""
        self._step_end.long_validation.agree()

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
                    for name, value in scalars(measured).items()
                },
            )
        wanted = float(self.stop or self.model.stop_training)
        (ranks,) = sum_arrays([np.array(wanted)], "stop")
        self.model.stop_training = self.stopped = bool(ranks)
        self._save(epoch + 1)
        if not self.stopped:
            self._step_end.finish_epoch(epoch)


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what is a single number of what was measured."""
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}


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
