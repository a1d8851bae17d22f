"""Training loop around ``fit``: callbacks at the end of steps and epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.keras.backend import learning_rates, traced
from hvd_estimators.keras.checkpoint import PartialEpoch
from hvd_estimators.keras.collectives import StatisticsAverager, sum_arrays
from hvd_estimators.keras.metrics import results, scalars
from hvd_estimators.keras.shard_state import MicroBatches, RandomStreams
from hvd_estimators.keras.user_callbacks import CallbackStates
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.shard_state import ShardStates
from hvd_estimators.training.spec import EpochMetrics, TrainSpec
from hvd_estimators.training.step_control import StepControl

ops: Any = keras.ops


class NotFinite:
    """Detect NaN or infinite values in a model's loss and trainable variables.

    Parameters
    ----------
    model : keras.Model
        The built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._variables = [
            variable
            for variable in model.trainable_variables
            if keras.backend.is_float_dtype(variable.dtype)
        ]
        # One call checks all variables, and only one flag is read if all are finite.
        self._are_finite = traced(self._all_finite)

    def after_step(self, logs: Mapping[str, Any]) -> tuple[float | None, list[str]]:
        """Return the loss if it is NaN or infinite, and the paths of such variables.

        Parameters
        ----------
        logs : mapping
            Logs of the step. Their loss is the mean of the epoch so far, and a single loss that is
            not finite makes this mean not finite.
        """
        loss = logs.get("loss")
        value = None if loss is None or np.ndim(loss) else float(loss)
        bad_loss = None if value is None or np.isfinite(value) else value
        if not self._variables or bool(self._are_finite()):
            return bad_loss, []
        return bad_loss, [v.path for v in self._variables if not bool(_is_finite(v))]

    def _all_finite(self) -> Any:
        return ops.all(ops.stack(list(map(_is_finite, self._variables))))


def _is_finite(variable: Any) -> Any:
    return ops.all(ops.isfinite(variable))


class StepEnd:
    """Check for NaN at the end of a step, save the run within an epoch, and stop on request.

    Parameters
    ----------
    spec : TrainSpec
        The training job.
    save : callable
        Called on all ranks with the completed batches of the epoch.
    control : StepControl
        Lets ranks agree on values that are not finite, on checkpoints and on stop requests.

    Attributes
    ----------
    checks_nan : bool
        Whether each step's logs must be checked.
    """

    def __init__(
        self,
        spec: TrainSpec,
        save: Callable[[int], None],
        control: StepControl,
    ) -> None:
        self._spec = spec
        self._save = save
        self._control = control
        self.checks_nan = spec.terminate_on_nan
        self._not_finite: NotFinite | None = None
        self._batches = spec.data.train_steps_per_epoch
        self._passes = spec.backward_passes_per_step

    def check_nan(
        self, model: keras.Model, epoch: int, batches: int, logs: Mapping[str, Any]
    ) -> None:
        """End training on all ranks if a value was not finite in a step.

        Parameters
        ----------
        model : keras.Model
            The model.
        epoch : int
            The epoch, from 0.
        batches : int
            Batches of a shard that are done in the epoch.
        logs : mapping
            Logs of the epoch so far.
        """
        if not self._is_step(batches):
            return
        if self._not_finite is None:
            self._not_finite = NotFinite(model)
        loss_and_paths = self._not_finite.after_step(logs)
        self._control.check_finite(self._spec.steps_done(epoch, batches), epoch, *loss_and_paths)

    def end(self, epoch: int, before: int, batches: int) -> None:
        """Save the run if a checkpoint is due or a stop is requested, and then stop on request.

        Does nothing after an epoch's last step, because the end of the epoch follows.

        Parameters
        ----------
        epoch : int
            The epoch, from 0.
        before, batches : int
            Batches of a shard that were done at the previous call, and that are done now.
        """
        made_progress()
        if batches >= self._batches or not self._is_step(batches):
            return
        complete = before - before % self._passes
        first, last = (self._spec.steps_done(epoch, count) for count in (complete, batches))

        def save() -> bool:
            self._save(batches)
            return True

        self._control.after_step(epoch, batches, range(first + 1, last + 1), save)

    def finish_epoch(self, epoch: int) -> None:
        """Stop training on request after an epoch, unless the epoch is the last one."""
        if epoch + 1 < self._spec.epochs:
            self._control.after_epoch(epoch + 1)

    def _is_step(self, batches: int) -> bool:
        return not batches % self._passes or batches >= self._batches


class EpochEnd(keras.callbacks.Callback):
    """Record an epoch after all other callbacks, and let ranks stop together.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The user's callbacks, the same on all ranks.
    history : sequence of EpochMetrics
        Epochs of an earlier part of the run.
    states : CallbackStates
        Restores the callbacks of a resumed run.
    progress : Progress
        Reports to the driver.
    save : callable
        Called after each epoch, on all ranks.
    step_end : StepEnd
        Stops training after an epoch on request.

    Attributes
    ----------
    history : list of EpochMetrics
        All epochs so far.
    stop : bool
        Whether a callback of this rank has requested a stop during the epoch.
    stopped : bool
        Whether callbacks have stopped training.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        history: Sequence[EpochMetrics],
        states: CallbackStates,
        progress: Progress,
        save: Callable[[], None],
        step_end: StepEnd,
    ) -> None:
        super().__init__()
        self.history = list(history)
        self._states = states
        self._progress = progress
        self._save = save
        self._step_end = step_end
        self._learning_rates: list[float] = []
        self.stop = False
        self.stopped = False

    def training_ended(self) -> None:
        """Record duration and learning rates of an epoch's training, before other callbacks."""
        self._progress.end_training()
        self._learning_rates = learning_rates(self.model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the callbacks, which have just reset their states."""
        self._states.restore()

    def resume_epoch(self, stop: bool) -> None:
        """Resume within an epoch that the callbacks have just started."""
        self._states.restore()
        self.stop = stop

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the epoch's metrics, agree on whether to stop, and save."""
        values = dict(logs or {})
        train = {name: v for name, v in values.items() if not name.startswith("val_")}
        validation = {
            name.removeprefix("val_"): v for name, v in values.items() if name.startswith("val_")
        }
        record = EpochMetrics(epoch, train, validation or None)
        self.history.append(record)
        self._progress.record(record, self._learning_rates)
        stop = float(self.stop or self.model.stop_training)
        (ranks,) = sum_arrays([np.array(stop)], "stop")
        self.model.stop_training = self.stopped = bool(ranks)
        self._save()
        if not self.stopped:
            self._step_end.finish_epoch(epoch)


class StreamsCallback(keras.callbacks.Callback):
    """Start the random streams of each shard that the rank runs, in each epoch.

    Parameters
    ----------
    streams : RandomStreams
        The rank's random streams.
    shards : ShardStates
        The rank's shards.
    """

    def __init__(self, streams: RandomStreams, shards: ShardStates) -> None:
        super().__init__()
        self._streams = streams
        self._shards = shards

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Start the streams of the epoch."""
        self._shards.for_each(lambda shard: self._streams.begin(shard, epoch))


class StatisticsCallback(keras.callbacks.Callback):
    """Reduce the variables that layers compute, before a validation or at the end of an epoch.

    Parameters
    ----------
    shards : ShardStates
        The rank's shards.
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
        """Record the statistics at the start of the epoch."""
        self._averager = StatisticsAverager(self.model, self._reductions)
        self._due = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Reduce the statistics of training before validation."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reduce the statistics if there was no validation."""
        self._average()

    @property
    def digests(self) -> list[bytes]:
        """Digests of the statistics at the start of the epoch; see `StatisticsAverager`."""
        return [] if self._averager is None else self._averager.digests

    @property
    def bases(self) -> dict[int, Any]:
        """Summed variables at the start of the epoch; see `StatisticsAverager`."""
        return {} if self._averager is None else self._averager.bases

    def resume_epoch(self, digests: Sequence[bytes], bases: Mapping[int, Any]) -> None:
        """Resume within an epoch that started with these statistics."""
        assert self._averager is not None
        self._averager.digests = list(digests)
        self._averager.bases.update(bases)

    def _average(self) -> None:
        if self._due and self._averager is not None:
            self._due = False
            self._averager.average(self._shards)


class ProgressReports(keras.callbacks.Callback):
    """Report the progress within an epoch to the driver. Rank 0 only.

    Parameters
    ----------
    progress : Progress
        Sends the reports.
    done : int
        Steps of the first epoch that an earlier part of the run completed.
    """

    def __init__(self, progress: Progress, done: int = 0) -> None:
        super().__init__()
        self._progress = progress
        self._done = done

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the start of the epoch."""
        self._progress.start_epoch(epoch, self._done)
        self._done = 0

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report this rank's metrics from time to time."""
        # Before the first batch, metrics have no results and are not even built.
        if batch and self._progress.count_step():
            self._progress.step(batch, scalars(results(self.model)))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the completed epoch."""
        self._progress.end_epoch(scalars(logs or {}))


class RankCallbacks(keras.callbacks.CallbackList):
    """All callbacks of a rank.

    A callback may set ``model.stop_training`` on some ranks only, because it depends on the rank's
    own batches or on a clock. The other ranks would then hang. Training therefore stops at the end
    of an epoch, on all ranks, if any rank requests a stop.

    Keras sends the logs of each batch, as numbers, to a separate thread even if no callback uses
    them. This class leaves unused logs in TensorFlow, which shortens the steps of a small model
    considerably.

    Parameters
    ----------
    callbacks : sequence of keras.callbacks.Callback
        The callbacks, in the order of their calls.
    end : EpochEnd
        The last callback.
    model : keras.Model
        The model.
    epochs, steps : int
        Epochs of the run, and steps per epoch.
    micro_batches : MicroBatches
        Groups batches into steps.
    statistics : StatisticsCallback
        The statistics callback among ``callbacks``.
    step_end : StepEnd
        Called after each step, after all callbacks.
    resumed : PartialEpoch or None
        Resumes within the first epoch.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        end: EpochEnd,
        model: keras.Model,
        epochs: int,
        steps: int,
        micro_batches: MicroBatches,
        statistics: StatisticsCallback,
        step_end: StepEnd,
        resumed: PartialEpoch | None,
    ) -> None:
        super().__init__(
            [*callbacks, end],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=steps,
            ranks=micro_batches.shards.num_shards,
            verbose=0,
        )
        self._end = end
        self._micro_batches = micro_batches
        self._statistics = statistics
        self._step_end = step_end
        self._resumed = resumed
        # Batches of the epoch that an earlier part of the run has trained on.
        self._skipped = 0
        self._batch_ends = True
        self._is_training = False
        self._epoch = self._done = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, now that the training function exists."""
        super().on_train_begin(logs)
        if self._resumed is not None:
            self._resumed.skip(self.model.steps_per_execution)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, and restore a partial epoch."""
        super().on_epoch_begin(epoch, logs)
        resumed, self._resumed = self._resumed, None
        self._skipped = 0
        if resumed is not None:
            self._skipped = resumed.batches
            digests, bases, stop = resumed.restore()
            self._statistics.resume_epoch(digests, bases)
            self._end.resume_epoch(stop)
        self._epoch, self._done = epoch, self._skipped // self._micro_batches.passes
        self._is_training = True
        # Checked in every epoch, because instances can get other methods at any time.
        self._batch_ends = any(map(_takes_batch_ends, self.callbacks))

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks if a step begins."""
        if batch < self._skipped:
            return
        step = self._micro_batches.begin(batch)
        if step is not None:
            super().on_train_batch_begin(step, logs)
            self._defer_stop()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks if a step ends and any callback uses this event."""
        if batch < self._skipped:
            return
        step = self._micro_batches.end(batch)
        if step is None:
            return
        if self._micro_batches.passes > 1 and (self._step_end.checks_nan or self._batch_ends):
            # The logs from Keras may belong to an empty micro-batch.
            logs = self.model.get_metrics_result()
        if self._step_end.checks_nan:
            # Checked before the callbacks: one may raise its own error on one rank only.
            self._step_end.check_nan(self.model, self._epoch, step + 1, logs or {})
        if self._batch_ends and self._micro_batches.notifies_after(step):
            super().on_train_batch_end(step, logs)
            self._defer_stop()
        before, self._done = self._done, step + 1
        self._step_end.end(self._epoch, before, step + 1)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks before a validation, which ends the epoch's training."""
        self._end_training()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks at the end of an epoch."""
        self._end_training()
        super().on_epoch_end(epoch, logs)

    def _end_training(self) -> None:
        if self._is_training:
            self._is_training = False
            self._end.training_ended()

    def _defer_stop(self) -> None:
        if self.model.stop_training:
            self._end.stop = True
            self.model.stop_training = False


def _takes_batch_ends(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False
    # Checks the instance, because LambdaCallback and others set methods on instances.
    return any(
        getattr(getattr(callback, name), "__func__", None)
        is not getattr(keras.callbacks.Callback, name)
        for name in ("on_train_batch_end", "on_batch_end")
    )
