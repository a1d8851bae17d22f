"""The time at which a rank has ended, if the clock of its host is wrong."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
from second_task import outcome_of_second_task

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rendezvous import server
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.task import run
from hvd_estimators.launch.task.addresses import Host

pytestmark = pytest.mark.timeout(60)

AHEAD = 3600.0


def test_a_rank_has_ended_by_the_clock_of_the_host_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + AHEAD, monotonic=time.monotonic)
    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(run, "start_rank", lambda *_, **__: contextlib.ExitStack())
    ended = RankOutcome(1, "here", None, "ValueError", "no", ended_at=time.time())
    monkeypatch.setattr(run, "supervise", lambda *_: [ended])
    with RendezvousServer(b"s", ["127.0.0.1"]) as rendezvous:
        rendezvous.store.expect(["here", "here"])
        rendezvous.listen("127.0.0.1")
        here = Host("1", "here", "")
        master = {"port": 1, "run_id": "x"}
        outcome = outcome_of_second_task(
            monkeypatch, here, here, rendezvous.endpoints, master, one_machine=True, verbose=0
        )
    assert outcome.error_type == "ValueError"
    assert outcome.ended_at - ended.ended_at == pytest.approx(AHEAD, abs=600)
