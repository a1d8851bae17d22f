"""What is done at the end of each step and of each epoch, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvd_estimators.keras.averaging import sum_arrays
from hvd_estimators.keras.checkpoint import CallbackStates
from hvd_estimators.keras.finite import NotFinite
from hvd_estimators.launch.rank.liveness import made_progress
from hvd_estimators.training.finite import FiniteCheck
from hvd_estimators.training.interruption import StopRequest, interrupted
from hvd_estimators.training.long_validation import LongValidation
from hvd_estimators.training.progress import Progress
from hvd_estimators.training.spec import EpochMetrics, TrainSpec
from hvd_estimators.training.tensorboard import EventWriter

__all__ = ["EpochEnd", "StepEnd", "scalars"]


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
    finite : FiniteCheck
        Lets ranks agree on what is not finite.
    long_validation : LongValidation
        Tells whether to save before validation.
    """

    def __init__(
        self,
        spec: TrainSpec,
        save: Callable[[int, int], None],
        stop_request: StopRequest,
        finite: FiniteCheck,
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
