"""Ending of ranks after a failure, and the reported outcomes, with fake processes."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from fake_clock import FakeClock, set_clock

from hvd_estimators.launch.rank import supervisor
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.supervisor import failure_of, supervise
from hvd_estimators.launch.rendezvous.server import Failure

# A rank must not import this module, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

GRACE = 3.0
FAR = Failure(7, "far", "had failed (ValueError: no)")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return set_clock(monkeypatch, supervisor)


class Process:
    """A rank that ends by itself after some seconds, with a result or an error."""

    def __init__(self, clock: FakeClock, rank: int, seconds: float, error: str = "") -> None:
        self.rank = rank
        self._clock, self._seconds, self._error = clock, seconds, error
        self.ended_at: float | None = None
        self.stalls_at = float("inf")

    def running(self) -> bool:
        return self._clock.now < self._seconds

    def outcome(self) -> RankOutcome:
        self.ended_at = self._seconds
        if self._error:
            return RankOutcome(self.rank, "here", None, "ValueError", f"a\nb: {self._error}\n")
        return RankOutcome(self.rank, "here", b"result")

    def poll(self) -> str | None:
        return "stands still" if self._clock.now > self.stalls_at else None

    def abort(self, error_type: str = "aborted", error: str = "Ended.") -> RankOutcome:
        if not self.running():
            return self.outcome()
        self.ended_at = self._clock.now
        return RankOutcome(self.rank, "here", None, error_type, error, "its output")


def by_rank(outcomes: list[RankOutcome]) -> list[RankOutcome]:
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def test_remaining_ranks_are_ended_after_the_grace_period(clock: FakeClock) -> None:
    left = Process(clock, 0, 3600)
    outcomes = by_rank(supervise([left, Process(clock, 1, 10, "no"), Process(clock, 2, 11)]))

    assert outcomes[0].error_type == "aborted"
    assert outcomes[0].error == "Ended because rank 1 on here had failed (b: no)."
    assert outcomes[0].output_tail == "its output"
    assert left.ended_at == pytest.approx(10 + GRACE, abs=0.2)
    assert outcomes[1].error_type == "ValueError"
    assert outcomes[2].result == b"result"


def test_a_failure_on_another_host_ends_the_local_ranks(clock: FakeClock) -> None:
    process = Process(clock, 0, 3600)
    (outcome,) = supervise([process], lambda: FAR if clock.now > 5 else None)

    assert (outcome.error_type, outcome.lost) == ("aborted", None)
    assert outcome.error == "Ended because rank 7 on far had failed (ValueError: no)."
    assert process.ended_at == pytest.approx(5 + GRACE, abs=0.2)


def test_a_lost_rank_is_reported_to_the_driver(clock: FakeClock) -> None:
    lost = Failure(7, "far", "has not answered for 60 s", lost=True)
    (outcome,) = supervise([Process(clock, 0, 3600)], lambda: lost)

    assert (outcome.error_type, outcome.lost) == ("lost", (7, "far"))


def test_a_rank_that_ends_within_the_grace_period_keeps_its_outcome(clock: FakeClock) -> None:
    failed, ended = Process(clock, 0, GRACE - 1, "broken pipe"), Process(clock, 1, GRACE - 2)
    outcomes = by_rank(supervise([failed, ended], lambda: FAR))

    assert [outcome.error_type for outcome in outcomes] == ["ValueError", ""]
    assert failure_of(outcomes[0]) == Failure(0, "here", "had failed (b: broken pipe)")


def test_a_stalled_rank_fails_and_the_others_are_ended(clock: FakeClock) -> None:
    stalling, other = Process(clock, 0, 3600), Process(clock, 1, 3600)
    stalling.stalls_at = 7.0
    outcomes = by_rank(supervise([stalling, other]))

    assert [outcome.error_type for outcome in outcomes] == ["stalled", "aborted"]
    assert outcomes[0].error == "stands still"
    assert outcomes[1].error == "Ended because rank 0 on here had failed (stands still)."
    assert (stalling.ended_at, other.ended_at) == pytest.approx((7, 7 + GRACE), abs=0.2)
