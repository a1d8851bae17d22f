"""Supervision of rank processes: ends the remaining ranks when one rank of the job fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.process import RankProcess
from hvd_estimators.launch.rendezvous.server import Failure

__all__ = ["failure_of", "supervise"]

_POLL_SECONDS = 0.05
# A rank whose peer failed usually ends by itself, with an error that is worth reporting.
_GRACE_SECONDS = 3.0


def supervise(
    ranks: Sequence[RankProcess], elsewhere: Callable[[], Failure | None] = lambda: None
) -> list[RankOutcome]:
    """Wait until all processes have ended, and return their outcomes in the order of their ends.

    A stalled rank counts as failed. When a rank has failed, here or elsewhere, the other ranks are
    ended after 3 s. If the wait is interrupted, all ranks are terminated at the same time, because
    ranks that must save state do so together.

    Parameters
    ----------
    ranks : sequence of RankProcess
        The job's running processes that this process has started.
    elsewhere : callable
        Returns, without waiting, the failure of the job outside these processes, or None.
    """
    try:
        return _supervise(ranks, elsewhere)
    except BaseException:
        for process in ranks:
            process.terminate()
        raise


def _supervise(
    ranks: Sequence[RankProcess], elsewhere: Callable[[], Failure | None]
) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    failure: Failure | None = None
    deadline = float("inf")
    while True:
        now = time.monotonic()
        failed_before = failure
        for process in ranks:
            if process.rank in outcomes:
                continue
            if not process.running():
                outcome = process.outcome()
            elif failed_before is not None and now > deadline:
                outcome = _ended_by(failed_before, process.abort())
            elif stall := process.stalled():
                outcome = process.abort("stalled", f"{stall}{_waiting(ranks)}")
            else:
                continue
            outcomes[process.rank] = outcome
            if outcome.failed:
                failure = failure or failure_of(outcome)
        failure = failure or elsewhere()
        if failure is not None:
            deadline = min(deadline, now + _GRACE_SECONDS)
        if len(outcomes) == len(ranks):
            return list(outcomes.values())
        time.sleep(_POLL_SECONDS)


def failure_of(outcome: RankOutcome) -> Failure:
    """Return a short description of a rank's failure for the other ranks."""
    if outcome.lost is not None:
        return Failure(outcome.rank, outcome.host, f"has lost touch: {outcome.error}")
    lines = outcome.error.rstrip().splitlines() or [""]
    # A traceback ends with the error; a stall's reason precedes the call stacks of waiting ranks.
    reason = lines[0 if outcome.error_type == "stalled" else -1]
    return Failure(outcome.rank, outcome.host, f"had failed ({reason[:200]})")


def _waiting(ranks: Sequence[RankProcess]) -> str:
    """Return the call stacks of ranks that wait without progress."""
    stacks = [(process.rank, process.waits_in) for process in ranks]
    return "".join(f"\nRank {rank} waits here:\n{stack}" for rank, stack in stacks if stack)


def _ended_by(failure: Failure, outcome: RankOutcome) -> RankOutcome:
    """Return the outcome of a rank that was ended because another rank failed."""
    if outcome.error_type != "aborted":
        return outcome  # the rank ended by itself before the abort
    return replace(
        outcome,
        error_type="lost" if failure.lost else "aborted",
        error=f"Ended because {failure}.",
        lost=(failure.rank, failure.host) if failure.lost else None,
    )
