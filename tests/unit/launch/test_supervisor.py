"""Ending of ranks after a failure, and the reported outcomes, with fake processes."""

from __future__ import annotations

import os
import pickle
import sys
import time

import cloudpickle
import pytest
from fake_clock import FakeClock, set_clock

from hvd_estimators.launch.rank import supervisor
from hvd_estimators.launch.rank.environment import Master, assign_ranks, child_environment
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rank.process import pickle_call
from hvd_estimators.launch.rank.supervisor import RankLauncher, failure_of, supervise
from hvd_estimators.launch.rendezvous.client import LocalRendezvousClient
from hvd_estimators.launch.rendezvous.server import Failure, JobStore

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
        self.waits_in = ""

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


def test_all_results_are_waited_for(clock: FakeClock) -> None:
    outcomes = supervise([Process(clock, 0, 3600), Process(clock, 1, 1)])

    assert [outcome.rank for outcome in outcomes] == [1, 0]
    assert not any(outcome.failed for outcome in outcomes)
    assert clock.now == pytest.approx(3600, abs=0.2)


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
    assert failure_of(outcome).why.startswith(
        "has lost its connection: Ended because rank 7 on far"
    )


def test_a_rank_that_ends_within_the_grace_period_keeps_its_outcome(clock: FakeClock) -> None:
    failed, ended = Process(clock, 0, GRACE - 1, "broken pipe"), Process(clock, 1, GRACE - 2)
    outcomes = by_rank(supervise([failed, ended], lambda: FAR))

    assert [outcome.error_type for outcome in outcomes] == ["ValueError", ""]
    assert failure_of(outcomes[0]) == Failure(0, "here", "had failed (b: broken pipe)")


def test_a_stalled_rank_fails_and_the_others_are_ended(clock: FakeClock) -> None:
    stalling, other = Process(clock, 0, 3600), Process(clock, 1, 3600)
    stalling.stalls_at = 7.0
    other.waits_in = "File 'step.py', line 3, in allreduce"
    outcomes = by_rank(supervise([stalling, other]))

    assert [outcome.error_type for outcome in outcomes] == ["stalled", "aborted"]
    assert outcomes[0].error == f"stands still\nRank 1 waits here:\n{other.waits_in}"
    assert outcomes[1].error == "Ended because rank 0 on here had failed (stands still)."
    assert (stalling.ended_at, other.ended_at) == pytest.approx((7, 7 + GRACE), abs=0.2)


def test_several_failures_do_not_extend_the_grace_period(clock: FakeClock) -> None:
    ranks = [Process(clock, rank, 1 + rank, "no") for rank in range(3)]
    left = Process(clock, 3, 3600)
    supervise([*ranks, left])

    assert left.ended_at == pytest.approx(1 + GRACE, abs=0.2)


@pytest.mark.timeout(60)
def test_a_launched_rank_has_its_variables_and_forwards_its_output():
    def work() -> dict[str, str]:
        print("out")
        print("error", file=sys.stderr)
        time.sleep(2)  # the supervisor checks the process twice a second
        return dict(os.environ)

    def environment(*of_rank: dict[str, str | None]) -> dict[str, str]:
        given.extend(of_rank)
        return child_environment(os.environ, *of_rank, {"A": "b"})

    given: list[dict[str, str | None]] = []
    lines: dict[str, list[str]] = {}
    called: list[bool] = []
    slot = assign_ranks(["here", "here"])[1]
    master = Master("10.0.0.1", 1234, "run")
    launcher = RankLauncher(pickle_call(work, (), {}), b"secret" * 8, environment, master)
    with launcher.start(
        slot,
        "127.0.0.1",
        LocalRendezvousClient(JobStore(silence=float("inf")), slot.rank),
        {"CUDA_VISIBLE_DEVICES": "7"},
        lambda stream, given: lines.setdefault(stream, []).extend(given),
        separate_streams=True,
        on_called=lambda: called.append(True),
    ) as process:
        (outcome,) = supervise([process])
    assert (outcome.rank, outcome.host, outcome.error) == (1, "here", "")
    env = pickle.loads(outcome.result or b"")
    assert (env["A"], env["HOROVOD_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("b", "1", "7")
    assert all(env.get(name) == value for own in given for name, value in own.items())
    # The rank sees only its own GPU.
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == ("1", "0", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "1234")
    assert {"HOROVOD_GLOO_RENDEZVOUS_PORT", "HVD_ESTIMATORS_GLOO_ADDRESS"} <= env.keys()
    assert lines == {"stdout": ["out\n"], "stderr": ["error\n"]}
    assert called == [True]
