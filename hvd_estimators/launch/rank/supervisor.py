"""Watches the processes of ranks, and ends those that are left when one of the job fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.process import RankProcess
from hvd_estimators.launch.rendezvous.server import Failure

__all__ = ["failure_of", "supervise"]

_POLL_SECONDS = 0.05
# A rank whose peer failed mostly ends by itself, with an error of its own that is worth having.
_GRACE_SECONDS = 3.0


def supervise(
    ranks: Sequence[RankProcess], elsewhere: Callable[[], Failure | None] = lambda: None
) -> list[RankOutcome]:
    """Wait until all processes have ended, and return how, in the order in which they ended.

    One that has stalled counts as failed. When one has failed, here or elsewhere, the others are
    ended soon after. Where the waiting is interrupted all of them are let go at the same time,
    since those that have something to save do so together.

    Parameters
    ----------
    ranks : sequence of RankProcess
        The job's processes on this machine that this process has started, and that run.
    elsewhere : callable
        Returns why the job cannot go on, once there is a reason beyond these processes; without
        waiting.
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
    """Return what is told of a failed rank to others: in a few words why it failed."""
    if outcome.lost is not None:
        return Failure(outcome.rank, outcome.host, f"has lost touch: {outcome.error}")
    lines = outcome.error.rstrip().splitlines() or [""]
    # A traceback names the error last; a stall comes before the calls in which ranks wait.
    reason = lines[0 if outcome.error_type == "stalled" else -1]
    return Failure(outcome.rank, outcome.host, f"had failed ({reason[:200]})")


def _waiting(ranks: Sequence[RankProcess]) -> str:
    """Return where ranks wait that have made no progress."""
    stacks = [(process.rank, process.waits_in) for process in ranks]
    return "".join(f"\nRank {rank} waits here:\n{stack}" for rank, stack in stacks if stack)


def _ended_by(failure: Failure, outcome: RankOutcome) -> RankOutcome:
    """Return how a rank ended that was to be ended because of a failure of another one."""
    if outcome.error_type != "aborted":
        return outcome  # it ended by itself just then
    return replace(
        outcome,
        error_type="lost" if failure.lost else "aborted",
        error=f"Ended because {failure}.",
        lost=(failure.rank, failure.host) if failure.lost else None,
    )
