"""The time at which a rank has ended, if the clock of its host is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.rendezvous import server
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.launch.task import run
from hvd_estimators.launch.task.addresses import Host
from hvd_estimators.launch.task.settings import TaskSettings

pytestmark = pytest.mark.timeout(60)

AHEAD = 3600.0


def test_a_rank_has_ended_by_the_clock_of_the_host_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + AHEAD, monotonic=time.monotonic)
    monkeypatch.setattr(server, "time", clock)
    infos = [SimpleNamespace(address="127.0.0.1:1")] * 2
    context: Any = SimpleNamespace(
        partitionId=lambda: 1, getTaskInfos=lambda: infos, resources=dict
    )
    monkeypatch.setattr(run, "BarrierTaskContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(run, "start_rank", lambda *_, **__: contextlib.ExitStack())
    ended = RankOutcome(1, "here", None, "ValueError", "no", ended_at=time.time())
    monkeypatch.setattr(run, "supervise", lambda *_: [ended])
    settings = TaskSettings(
        one_machine=True,
        driver_env={},
        env={},
        driver_path=(),
        executable=None,
        verbose=0,
        secret=b"s",
    )
    with RendezvousServer(b"s", ["127.0.0.1"]) as rendezvous:
        rendezvous.store.expect(["here", "here"])
        rendezvous.listen("127.0.0.1")
        first: dict[str, Any] = {
            "host": dataclasses.asdict(Host("1", "here", "")),
            "problem": None,
        }
        master = {"port": 1, "run_id": "x"}
        peers = [{**first, "endpoints": rendezvous.endpoints, "master": master}, first]
        monkeypatch.setattr(run, "exchange", lambda context, driver, facts: peers)
        (batch,) = run.run_rank(settings)
    outcome = RankOutcome(**pickle.loads(batch.to_pylist()[0]["outcome"]))
    assert outcome.error_type == "ValueError"
    assert outcome.ended_at - ended.ended_at == pytest.approx(AHEAD, abs=600)
