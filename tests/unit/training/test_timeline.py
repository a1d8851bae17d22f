"""Horovod's timeline: one valid file of all ranks, in the run's logs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvd_estimators import Store
from hvd_estimators.launch import LocalBackend
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
