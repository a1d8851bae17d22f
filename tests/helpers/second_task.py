"""The second of two Spark tasks, without Spark and without the first one's task."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.task import run
from hvd_estimators.launch.task.addresses import Host
from hvd_estimators.launch.task.settings import TaskSettings


def outcome_of_second_task(
    monkeypatch: pytest.MonkeyPatch,
    first: Host,
    second: Host,
    endpoints: Any,
    master: dict[str, Any],
    **settings: Any,
) -> RankOutcome:
    """Return the outcome of the task, to which the first one has sent endpoints and a master."""
    infos = [SimpleNamespace(address="127.0.0.1:1")] * 2
    context: Any = SimpleNamespace(
        partitionId=lambda: 1, getTaskInfos=lambda: infos, resources=dict
    )
    monkeypatch.setattr(run, "BarrierTaskContext", SimpleNamespace(get=lambda: context))
    of_first, of_second = (
        {"host": dataclasses.asdict(host), "problem": None} for host in (first, second)
    )
    peers = [{**of_first, "endpoints": endpoints, "master": master}, of_second]
    monkeypatch.setattr(run, "exchange", lambda context, driver, facts: peers)
    job = TaskSettings(
        driver_env={}, env={}, driver_path=(), executable=None, secret=b"s", **settings
    )
    (batch,) = run.run_rank(job)
    (row,) = batch.to_pylist()
    outcome = RankOutcome(**pickle.loads(row["outcome"]))
    assert outcome.rank == 1
    return outcome
