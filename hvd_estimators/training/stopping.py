"""Runs that a callback has stopped: a later fit returns their model, and trains nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hvd_estimators.training.spec import TrainSpec
from hvd_estimators.training.state import RunState

__all__ = ["heeding_stop", "stopped_before"]

S = TypeVar("S", bound=TrainSpec)


def heeding_stop(spec: S, state: RunState | None) -> S:
    """Return a job without further epochs, if its run has been stopped and is not to go on.

    Runs on every rank, after the run's newest checkpoint has been restored.

    Parameters
    ----------
    spec : TrainSpec
        The job.
    state : RunState or None
        What was restored.
    """
    if state is None or not stopped_before(spec, state):
        return spec
    return replace(spec, epochs=min(spec.epochs, state.epoch))


def stopped_before(spec: TrainSpec, state: RunState | None) -> bool:
    """Return whether a run has been stopped, and is to stay so."""
    return state is not None and state.stopped and not spec.resume_stopped
