"""Horovod's timeline: one valid file of all ranks, in the run's logs."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators import Store
from hvd_estimators.launch import LocalBackend
from hvd_estimators.launch.rank.outcome import RankOutcome
from hvd_estimators.launch.service.timeline import (
    keep_timeline,
    make_room_for_timeline,
    timeline_path,
    with_timeline,
)
from hvd_estimators.store.base import RunPaths
from hvd_estimators.training.call_transfer import Handover, train_stored
from hvd_estimators.training.horovod_session import gather_timeline
from hvd_estimators.training.spec import TrainResult

pytestmark = pytest.mark.timeout(300)


@dataclasses.dataclass
class Spec:
    """The parts of a TrainSpec that matter here."""

    store: Store
    run: RunPaths


def train(spec: Any) -> TrainResult:
    import horovod.torch as hvd
    import torch

    if os.environ["HOROVOD_RANK"] == "1":
        os.environ["HOROVOD_TIMELINE"] += ".of-rank-1"
    hvd.init()
    for number in range(3):
        hvd.allreduce(torch.ones(2), name=f"numbers-{number}")
    return TrainResult("", None, ())


def test_the_timeline_of_a_fit_is_in_the_runs_logs(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    spec = Spec(store, store.run_paths("mine"))
    path = tmp_path / "new folder" / "seen.json"

    for name in ("timeline.json", "timeline-1.json"):
        with Handover(spec, "nothing") as handover:  # type: ignore[arg-type]
            LocalBackend(2).run(
                train_stored, (handover.put(train),), env={"HOROVOD_TIMELINE": str(path)}
            )

        # Horovod's rank 0 writes what it knows of all ranks.
        assert [p.name for p in path.parent.iterdir()] == ["seen.json"]
        events = json.loads(path.read_text())
        named = {event["args"]["name"] for event in events if "name" in event.get("args", {})}
        assert {f"allreduce.numbers-{number}" for number in range(3)} <= named
        assert (Path(str(spec.run.logs_path)) / name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("variable", "rank", "logs"),
    [(None, "0", "logs"), ("DYNAMIC", "0", "logs"), ("x.json", "1", "logs"), ("x.json", "0", None)],
)
def test_without_a_timeline_nothing_is_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    rank: str,
    logs: str | None,
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda *call: registered.append(call))
    monkeypatch.setenv("HOROVOD_RANK", rank)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    if variable is not None:
        monkeypatch.setenv("HOROVOD_TIMELINE", variable)

    gather_timeline(Store.create(str(tmp_path)), logs)

    assert not registered


def test_the_timeline_of_a_job_comes_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task and the driver are one process in two folders, in which the same name is meant."""
    env = {"HOROVOD_TIMELINE": "new/seen.json"}
    task, driver = tmp_path / "task", tmp_path / "driver"
    for folder in (task, driver):
        folder.mkdir()
    ended = RankOutcome(0, "far", b"result")

    monkeypatch.chdir(task)
    (task / "new").mkdir()
    (task / "new" / "seen.json").write_text("of an earlier job")
    make_room_for_timeline(env)
    assert with_timeline(ended, env, 100) is ended  # Horovod wrote nothing
    (task / "new" / "seen.json").write_text("[]")
    outcome = with_timeline(ended, env, len(b"result") + 2)
    assert outcome.timeline == ("new/seen.json", b"[]")

    monkeypatch.chdir(driver)
    keep_timeline([RankOutcome(1, "far", b""), RankOutcome(**pickle.loads(pickled(outcome)))])
    assert (driver / "new" / "seen.json").read_text() == "[]"


def test_a_timeline_that_is_too_large_or_cannot_be_written_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen.json"
    path.write_bytes(b" " * 2**20)
    env = {"HOROVOD_TIMELINE": str(path)}
    large = with_timeline(RankOutcome(0, "far", b"result"), env, 2**20 + 5)
    assert large.timeline == (str(path), 2**20)
    keep_timeline([large])
    assert f"left on far, in {str(path)!r}: of its 1.0 MiB" in caplog.text

    caplog.clear()
    below_a_file = str(path / "seen.json")
    make_room_for_timeline({"HOROVOD_TIMELINE": below_a_file})
    keep_timeline([RankOutcome(0, "far", b"", timeline=(below_a_file, b"[]"))])
    assert caplog.text.count(f"{below_a_file!r} c") == 2
    for value in ({}, {"HOROVOD_TIMELINE": ""}, {"HOROVOD_TIMELINE": "DYNAMIC"}):
        assert timeline_path(value) is None


def pickled(outcome: RankOutcome) -> bytes:
    return pickle.dumps(dataclasses.asdict(outcome))
