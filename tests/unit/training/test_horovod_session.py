"""A rank's Horovod session: process sets, seeds, and the timeline in the run's logs."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import wait_until

from hvd_estimators import Store
from hvd_estimators.launch import LocalBackend
from hvd_estimators.store.base import RunPaths
from hvd_estimators.training.call_transfer import CallTransfer, train_stored
from hvd_estimators.training.horovod_session import gather_timeline, rank_seed, seed_rank
from hvd_estimators.training.spec import TrainResult

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import horovod.{first} as hvd
from horovod.common import process_sets
from hvd_estimators.training.horovod_session import horovod_session

for _ in range(2):
    with horovod_session(hvd, None):
        import horovod.{second}

        print(hvd.global_process_set.size(), process_sets.global_process_set.rank())
horovod.{second}.init()
print(horovod.{second}.global_process_set.size())
"""


def test_importing_another_framework_keeps_the_process_sets() -> None:
    program = textwrap.dedent(PROGRAM).format(first="tensorflow", second="torch")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.stdout.splitlines() == ["1 0", "1 0", "1"], ended.stderr[-4000:]


def test_seeds_differ_between_ranks_epochs_and_seeds() -> None:
    places = [(s, r, e) for s in (0, 1, 2**31) for r in range(4) for e in range(4)]
    seeds = [rank_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert seeds == [rank_seed(*place) for place in places]
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_python_and_numpy_are_seeded() -> None:
    drawn = []
    for rank in (0, 0, 1):
        seed_rank(7, rank, epoch=2)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


@dataclasses.dataclass
class Spec:
    """The parts of a TrainSpec that these tests need."""

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
    # Horovod's writer drops the events that it has not written when Horovod shuts down.
    timeline = Path(os.environ["HOROVOD_TIMELINE"])
    if os.environ["HOROVOD_RANK"] == "0":
        wait_until(lambda: "numbers-2" in timeline.read_text(), 30)
    return TrainResult("", None, ())


def test_the_timeline_of_a_fit_is_in_the_runs_logs(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    spec = Spec(store, store.run_paths("mine"))
    path = tmp_path / "new folder" / "seen.json"

    for name in ("timeline.json", "timeline-1.json"):
        with CallTransfer(spec) as handover:  # type: ignore[arg-type]
            LocalBackend(2).run(
                train_stored, (handover.put(train),), env={"HOROVOD_TIMELINE": str(path)}
            )

        # Horovod's rank 0 writes the timeline of all ranks.
        assert [p.name for p in path.parent.iterdir()] == ["seen.json"]
        events = json.loads(path.read_text())
        named = {event["args"]["name"] for event in events if "name" in event.get("args", {})}
        assert {f"allreduce.numbers-{number}" for number in range(3)} <= named
        assert (Path(str(spec.run.logs_path)) / name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("variable", "rank", "logs"),
    [(None, "0", "logs"), ("DYNAMIC", "0", "logs"), ("x.json", "1", "logs"), ("x.json", "0", None)],
)
def test_nothing_is_registered_without_a_timeline(
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
