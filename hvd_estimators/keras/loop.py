"""Training loop around ``fit``: callbacks at the end of steps and epochs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.keras.backend import learning_rates, traced
from hvd_estimators.keras.checkpoint import PartialEpoch, RunSaver
from hvd_estimators.keras.collectives import StatisticsAverager, sum_arrays
from hvd_estimators.keras.metrics import results, scalars
from hvd_estimators.launch.rank.hang_detection import made_progress
from hvd_estimators.training.progress import Progress
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
    control : StepControl
        Lets ranks agree on values that are not finite, on checkpoints and on stop requests.

    Attributes
    ----------
    checks_nan : bool
        Whether each step's logs must be checked.
    """

    def __init__(self, spec: TrainSpec, control: StepControl) -> None:
        self._spec = spec
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

    def end(
        self, epoch: int, before: int, batches: int, save_within: Callable[[int], None]
    ) -> None:
        """Save the run if a checkpoint is due or a stop is requested, and then stop on request.

        Does nothing after an epoch's last step, because the end of the epoch follows.

        Parameters
        ----------
        epoch : int
            The epoch, from 0.
        before, batches : int
            Batches of a shard that were done at the previous call, and that are done now.
        save_within : callable
            Saves the run after that number of batches. Called by all ranks.
        """
        made_progress()
        if batches >= self._batches or not self._is_step(batches):
            return
        complete = before - before % self._passes
        first, last = (self._spec.steps_done(epoch, count) for count in (complete, batches))

        def save() -> bool:
            save_within(batches)
            return True

        self._control.after_step(epoch, batches, range(first + 1, last + 1), save)

    def finish_epoch(self, epoch: int) -> None:
        """Stop training on request after an epoch, unless the epoch is the last one."""
        if epoch + 1 < self._spec.epochs:
            self._control.after_epoch(epoch + 1)

    def _is_step(self, batches: int) -> bool:
        return not batches % self._passes or batches >= self._batches


class RankCallbacks(keras.callbacks.CallbackList):
    """All callbacks of a rank, and what happens between them.

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
    model : keras.Model
        The model.
    epochs, steps : int
        Epochs of the run, and steps per epoch.
    saver : RunSaver
        Saves the run after each epoch, and within epochs. Has the states of the rank.
    history : list of EpochMetrics
        Epochs of an earlier part of the run, to which each epoch is added.
    progress : Progress
        Reports to the driver, on rank 0.
    step_end : StepEnd
        Called after each step, after all callbacks.
    resumed : PartialEpoch or None
        Resumes within the first epoch.

    Attributes
    ----------
    stop : bool
        Whether a callback of this rank has requested a stop during the epoch.
    stopped : bool
        Whether callbacks have stopped training.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        epochs: int,
        steps: int,
        saver: RunSaver,
        history: list[EpochMetrics],
        progress: Progress,
        step_end: StepEnd,
        resumed: PartialEpoch | None,
    ) -> None:
        self._micro_batches = saver.micro_batches
        # The last callback gets the logs to which the others have added.
        last = keras.callbacks.LambdaCallback(on_epoch_end=self._finish_epoch)
        super().__init__(
            [*callbacks, last],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=steps,
            ranks=self._micro_batches.shards.num_shards,
            verbose=0,
        )
        self._saver = saver
        self._records = history
        self._progress = progress
        self._step_end = step_end
        self._resumed = resumed
        self.stop = self.stopped = False
        # Batches of the epoch that an earlier part of the run has trained on.
        self._skipped = 0
        self._batch_ends = True
        self._is_training = False
        self._epoch = self._done = 0
        self._learning_rates: list[float] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks, and restore them, now that the training function exists."""
        super().on_train_begin(logs)
        self._saver.states.restore()
        if self._resumed is not None:
            self._resumed.skip()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Start the epoch's random streams, call the callbacks, and restore a partial epoch."""
        shards = self._micro_batches.shards
        shards.for_each(lambda shard: self._saver.streams.begin(shard, epoch))
        self._statistics = StatisticsAverager(self.model, shards.num_shards)
        super().on_epoch_begin(epoch, logs)
        resumed, self._resumed = self._resumed, None
        self._skipped = 0
        if resumed is not None:
            self._skipped = resumed.batches
            self._statistics.digests, self.stop = resumed.restore()
            self._saver.states.restore()
        self._epoch, self._done = epoch, self._skipped // self._micro_batches.passes
        if not shards.rank:
            self._progress.start_epoch(epoch, self._done)
        self._is_training = True
        # Checked in every epoch, because instances can get other methods at any time.
        self._batch_ends = any(map(_takes_batch_ends, self.callbacks))

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks if a step begins, and report metrics from time to time."""
        if batch < self._skipped:
            return
        step = self._micro_batches.begin(batch)
        if step is not None:
            super().on_train_batch_begin(step, logs)
            self._micro_batches.shards.begin_step()
            self._defer_stop()
            # Before the first batch, metrics have no results and are not even built.
            if step and not self._micro_batches.shards.rank and self._progress.count_step():
                self._progress.step(step, scalars(results(self.model)))

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
        if self._batch_ends:
            super().on_train_batch_end(step, logs)
            self._defer_stop()
        before, self._done = self._done, step + 1
        self._step_end.end(self._epoch, before, step + 1, self._save_within)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks before a validation, which ends the epoch's training."""
        self._end_training()
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Call the callbacks at the end of an epoch."""
        self._end_training()
        super().on_epoch_end(epoch, logs)

    def _end_training(self) -> None:
        """Record duration and learning rates of an epoch's training, and reduce statistics."""
        if self._is_training:
            self._is_training = False
            self._progress.end_training()
            self._learning_rates = learning_rates(self.model)
            self._statistics.average(self._micro_batches.shards)

    def _finish_epoch(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Record the epoch's metrics, agree on whether to stop, and save."""
        values = dict(logs or {})
        if not self._micro_batches.shards.rank:
            self._progress.end_epoch(scalars(values))
        train = {name: v for name, v in values.items() if not name.startswith("val_")}
        validation = {
            name.removeprefix("val_"): v for name, v in values.items() if name.startswith("val_")
        }
        record = EpochMetrics(epoch, train, validation or None)
        self._records.append(record)
        self._progress.record(record, self._learning_rates)
        stop = float(self.stop or self.model.stop_training)
        (ranks,) = sum_arrays([np.array(stop)], "stop")
        self.model.stop_training = self.stopped = bool(ranks)
        self._saver.save_epoch(self._records, self.stopped)
        if not self.stopped:
            self._step_end.finish_epoch(epoch)

    def _save_within(self, batches: int) -> None:
        """Save the run within an epoch, after the given number of batches. Called by all ranks."""
        self._saver.save_within(self._records, batches, self._statistics.digests, self.stop)

    def _defer_stop(self) -> None:
        if self.model.stop_training:
            self.stop = True
            self.model.stop_training = False


def separate_evaluation(model: keras.Model, own_step: Callable[[Any], Any]) -> None:
    """Make the validation of ``fit`` run the model's present ``test_step``, and others their own.

    Callbacks may evaluate rows of theirs on some ranks only, where ranks must not be reduced over.

    Parameters
    ----------
    model : keras.Model
        Its methods ``evaluate`` and ``test_step`` are replaced.
    own_step : callable
        The ``test_step`` without other ranks, for the user's calls.
    """
    of_user: Any = model.evaluate
    of_fit = of_user
    if type(model).evaluate.__module__.partition(".")[0] in ("keras_hub", "keras_nlp"):
        # Theirs prepares data, as their fit() does, which is not called.
        of_fit = functools.partial(keras.Model.evaluate, model)
    # A traced function for each step.
    traces = {True: (model.test_step, None), False: (own_step, None)}

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        is_fits = isinstance(kwargs.get("callbacks"), RankCallbacks)
        before = model.test_step, model.test_function
        model.test_step, model.test_function = traces[is_fits]
        try:
            return (of_fit if is_fits else of_user)(*args, **kwargs)
        finally:
            traces[is_fits] = model.test_step, model.test_function
            model.test_step, model.test_function = before

    model.test_step, model.evaluate = own_step, evaluate


def _takes_batch_ends(callback: keras.callbacks.Callback) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return False
    # Checks the instance, because LambdaCallback and others set methods on instances.
    return any(
        getattr(getattr(callback, name), "__func__", None)
        is not getattr(keras.callbacks.Callback, name)
        for name in ("on_train_batch_end", "on_batch_end")
    )
