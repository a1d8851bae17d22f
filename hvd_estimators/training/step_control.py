"""Decisions of all ranks between steps: to checkpoint, to stop on request, or to end on NaN.

A process that wants a rank to end sends SIGTERM. It can be the rank's guardian, if the task or the
driver has ended. It can also be the scheduler of a cluster that preempts a machine. A
``preemption_check`` and the driver, for executors that Spark decommissions, ask in the same way.
The ranks of a job are asked at different times, or only one of them is. They must not stop at
different steps, because the others would then wait forever. Therefore the ranks sum up, about once
a second, how many of them were asked to stop. Between two sums, a step only decrements a counter.

During validation, ranks do not synchronize, because each rank has a different number of batches.
They agree on a stop request after it.

Runs on the ranks; imports no framework.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Self, TypeVar

from hvd_estimators.exceptions import NotFiniteError, TrainingInterruptedError
from hvd_estimators.launch.rank.graceful_stop import asking_for_grace, mute_if_unheard
from hvd_estimators.launch.rank.preemption import watching
from hvd_estimators.training.object_collectives import ObjectExchange
from hvd_estimators.training.run_state import RunState
from hvd_estimators.training.spec import TrainSpec

# A sum over the ranks, to agree on stop requests, at most about this often.
_SECONDS_BETWEEN = 1.0

# The sum encodes two numbers, exactly in float64 for up to 65,535 ranks.
_MOST_STEPS = 2**16
_ASKED = 2.0**32

_MOST_NAMED = 5

S = TypeVar("S", bound=TrainSpec)


def without_further_epochs(spec: S, state: RunState | None) -> S:
    """Return a job without further epochs if its run was stopped and should not resume.

    Runs on every rank, after the run's newest checkpoint was restored.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    state : RunState or None
        The restored state.
    """
    if state is None or not stopped_before(spec, state):
        return spec
    return replace(spec, epochs=min(spec.epochs, state.epoch))


def stopped_before(spec: TrainSpec, state: RunState | None) -> bool:
    """Return whether a run was stopped and should not resume."""
    return state is not None and state.stopped and not spec.resume_stopped


class StepControl:
    """Checkpoints that are due, stop requests and the NaN check, as a context manager on each rank.

    In the block, SIGTERM and the spec's ``preemption_check`` count as stop requests, see
    `StopRequest`. The block must enclose the block of the `CheckpointWriter`: ranks that stop on
    request wait at its end until rank 0 has written the checkpoint.

    Parameters
    ----------
    spec : TrainSpec
        The training job.
    size : int
        The number of ranks.
    sum_over_ranks : callable
        Sums one number per rank exactly, in 64 bits, given the number and the reduction's name. All
        ranks call it.
    exchange : ObjectExchange
        Gathers the names of parameters that are not finite. Used only if there are any, or if a
        loss is not finite.
    """

    def __init__(
        self,
        spec: TrainSpec,
        size: int,
        sum_over_ranks: Callable[[float, str], float],
        exchange: ObjectExchange,
    ) -> None:
        self._options = spec.checkpoints
        self._has_checkpoints = spec.run.checkpoints_path is not None
        self._size = size
        self._sum_over_ranks = sum_over_ranks
        self._exchange = exchange
        self._stop = StopRequest(lambda value: sum_over_ranks(value, "stop_request"), size)
        self._check = spec.preemption_check
        self._stack = contextlib.ExitStack()
        self._is_due = self._stops = False

    def __enter__(self) -> Self:
        self._stack.enter_context(self._stop)
        self._stack.enter_context(watching(self._check, self._stop.ask))
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        with self._stack:
            if isinstance(exc, TrainingInterruptedError):
                # The end of a rank soon ends the others. Rank 0 comes here with its checkpoint
                # in the store; if that has failed, its end ends this wait.
                self._sum_over_ranks(0.0, "stopped")

    def request_stop(self) -> None:
        """Ask all ranks to save the run and to stop after a step. Any thread may call it."""
        self._stop.ask()

    def check_finite(
        self, step: int, epoch: int, loss: float | None, parameters: Sequence[str]
    ) -> None:
        """End training if a value is not finite on any rank. All ranks must call it.

        Call it before a checkpoint of the step is saved, so that all checkpoints are finite.

        Parameters
        ----------
        step : int
            Optimizer step of the run, from 1.
        epoch : int
            The step's epoch, from 0.
        loss : float or None
            A loss of this rank that is not finite; None if all losses are finite.
        parameters : sequence of str
            Names of the parameters that are not finite after the step.

        Raises
        ------
        NotFiniteError
            On all ranks, with the same message.
        """
        own = loss is not None or bool(parameters)
        if self._size == 1:
            of_ranks = [(loss, list(parameters))] if own else []
        elif self._sum_over_ranks(float(own), "not_finite"):
            of_ranks = self._exchange.gather((loss, list(parameters)), "not_finite")
        else:
            of_ranks = []
        if of_ranks:
            raise NotFiniteError(_not_finite_message(step, epoch, of_ranks))

    def after_step(
        self, epoch: int, batches: int, steps: Iterable[int], save: Callable[[], bool]
    ) -> None:
        """Save the run if a checkpoint is due or a stop is requested, and then stop on request.

        All ranks must call it equally often, but not after the last step of an epoch: the end of
        the epoch follows.

        Parameters
        ----------
        epoch, batches : int
            The epoch, from 0, and a shard's completed batches in it.
        steps : iterable of int
            The run's optimizer steps since the previous call, from 1.
        save : callable
            Saves the run on all ranks. If it returns False, because gradients still accumulate, it
            is called again after the next step.

        Raises
        ------
        TrainingInterruptedError
            If a rank was asked to stop.
        """
        self._is_due = any(map(self._options.due_after, steps)) or self._is_due
        self._stops = self._stop.after_step() or self._stops
        if not (self._is_due or self._stops):
            return
        if self._has_checkpoints and not save():
            return
        self._is_due = False
        if self._stops:
            raise interrupted(epoch, batches, self._has_checkpoints)

    def after_epoch(self, epochs: int) -> None:
        """Stop on request after an epoch whose checkpoint was saved. All ranks must call it.

        Parameters
        ----------
        epochs : int
            Number of completed epochs.

        Raises
        ------
        TrainingInterruptedError
            If a rank was asked to stop.
        """
        self._is_due = False
        if self._stop.after_step() or self._stops:
            raise interrupted(epochs, 0, self._has_checkpoints)


class StopRequest:
    """Context manager in which all ranks agree that one of them has received a stop request.

    In the block, SIGTERM does not end the process. It counts as a request, and the rank has a grace
    period (`hvd_estimators.launch.rank.graceful_stop`). It does end children that steps fork.
    Use the block in the rank's main thread. In another thread, a rank receives no signals, and
    detects only the requests of other ranks.

    Parameters
    ----------
    sum_over_ranks : callable
        Sums one number per rank exactly, in 64 bits. All ranks call it, between two steps.
    ranks : int
        Number of ranks.

    Examples
    --------
    ::

        with StopRequest(sum_over_ranks, hvd.size()) as stop:
            for step in ...:
                ...
                optimizer.step()
                if stop.after_step():
                    save_checkpoint(...)
                    raise interrupted(epoch, step, saved=True)
    """

    def __init__(self, sum_over_ranks: Callable[[float], float], ranks: int) -> None:
        self._sum = sum_over_ranks
        self._ranks = ranks
        self._is_stop_requested = False
        self._stack = contextlib.ExitStack()
        self._distance = self._left = 1
        self._agreed_at = time.monotonic()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(ValueError):  # this is not the main thread
                before = signal.signal(signal.SIGTERM, self._on_sigterm)
                stack.callback(signal.signal, signal.SIGTERM, before or signal.SIG_DFL)
                stack.enter_context(asking_for_grace())
            self._stack = stack.pop_all()
        self._agreed_at = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def ask(self) -> None:
        """Ask all ranks to stop, like SIGTERM. Any thread of any rank may call it."""
        self._is_stop_requested = True

    def after_step(self) -> bool:
        """Return whether to save a checkpoint and stop here. The result is the same on all ranks.

        All ranks must call it equally often: after each optimizer step, when a checkpoint can be
        written. At the end of an epoch, call it after the epoch's own checkpoint.
        """
        self._left -= 1
        return self._left <= 0 and self._agree()

    def _agree(self) -> bool:
        """Return whether any rank was asked to stop, and schedule the next check."""
        seconds = max(time.monotonic() - self._agreed_at, 1e-9)
        # A slow first step does not predict the next steps, and neither does a fast one.
        distance = min(_SECONDS_BETWEEN / seconds, 2.0) * self._distance
        own = min(max(int(distance), 1), _MOST_STEPS)
        num_requests, steps = divmod(
            self._sum(own + (_ASKED if self._is_stop_requested else 0.0)), _ASKED
        )
        self._distance = self._left = max(int(steps) // self._ranks, 1)
        self._agreed_at = time.monotonic()
        if num_requests:
            mute_if_unheard()
        return num_requests > 0

    def _on_sigterm(self, number: int, frame: FrameType | None) -> Any:
        self._is_stop_requested = True
        # The sender may have ended, together with the reader of this process's output.
        mute_if_unheard()


def _end_on_sigterm() -> None:
    """Let SIGTERM end a forked child, as `multiprocessing` expects; only the rank saves state."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_on_sigterm)


def interrupted(epoch: int, step: int, saved: bool) -> TrainingInterruptedError:
    """Return the error that ranks raise if they were asked to stop.

    Parameters
    ----------
    epoch : int
        The epoch, from 0.
    step : int
        Number of completed steps in the epoch; 0 if the previous epoch has just ended.
    saved : bool
        Whether there is a checkpoint of this position.
    """
    consequence = (
        "A checkpoint of this position was written: fit() with the same run_id resumes there."
        if saved
        else "The run keeps no checkpoints: no state of it is saved."
    )
    return TrainingInterruptedError(
        "The ranks were asked to end (by SIGTERM, preemption_check, or Spark's decommissioning), "
        f"and have stopped in epoch {epoch} after step {step}. {consequence}"
    )


def _not_finite_message(
    step: int, epoch: int, of_ranks: Sequence[tuple[float | None, list[str]]]
) -> str:
    parts = [
        f"the loss of rank {rank} is {loss}"
        for rank, (loss, _) in enumerate(of_ranks)
        if loss is not None
    ]
    names = list(dict.fromkeys(name for _, parameters in of_ranks for name in parameters))
    if names:
        more = f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
        parts.append(f"NaN or infinite after it: {', '.join(map(repr, names[:_MOST_NAMED]))}{more}")
    return (
        f"terminate_on_nan: training has ended at step {step} of the run (in epoch {epoch}, the "
        f"first being 0), on all ranks: {'; '.join(parts)}. Checkpoints are of steps before this "
        "one, and hold finite parameters. Resuming unchanged would end here again: look for "
        "values in the data that are not finite or are very large, set a lower learning rate, or "
        "clip gradients."
    )
