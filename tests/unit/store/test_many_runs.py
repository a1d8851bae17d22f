"""Stores with many runs: requests per run, and none of other runs for a new fit."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from variants import others_in_soak

from hvd_estimators import Store
from hvd_estimators.fitting.run import Run

METADATA = {
    "framework": "torch",
    "state": "finished",
    "started": "2026-11-20T10:00:00+00:00",
    "ended": "2026-11-20T10:05:00+00:00",
    "fits": [{"state": "finished"}],
}
OPERATIONS = ("ls", "info", "cat_file", "open", "find", "rm_file", "created", "modified")


def store_of(folder: Path, num_runs: int) -> Store:
    store = Store.create(str(folder))
    for number in range(num_runs):
        path = Path(store.run_paths(f"run-{number:05d}").run_path)
        path.mkdir(parents=True)
        (path / "metadata.json").write_text(json.dumps({**METADATA, "run_id": path.name}))
        rows = {"columns": [], "rows": [[0, "train", "loss", 1 / (number + 1)]]}
        (path / "history.json").write_text(json.dumps(rows))
    return store


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Count the operations on local files."""
    counts: collections.Counter[str] = collections.Counter()

    def counted(name: str) -> Any:
        original = getattr(LocalFileSystem, name)

        def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(self, *args, **kwargs)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(LocalFileSystem, name, counted(name))
    return counts


@pytest.mark.parametrize("num_runs", others_in_soak(200, 10_000))
def test_listing_runs_takes_two_reads_per_run(
    num_runs: int, tmp_path: Path, requests: collections.Counter[str]
) -> None:
    store = store_of(tmp_path, num_runs)
    requests.clear()
    runs = store.list_runs()
    assert len(runs) == num_runs
    assert len({run.run_id for run in runs}) == num_runs
    assert requests["ls"] == 1
    # The metadata and the history of each run.
    assert requests["cat_file"] == 2 * num_runs
    assert sum(requests.values()) <= 1 + 2 * 2 * num_runs + 10


@pytest.mark.parametrize("num_runs", others_in_soak(200, 10_000))
def test_a_new_run_does_not_look_at_others(
    num_runs: int, tmp_path: Path, requests: collections.Counter[str]
) -> None:
    counts = []
    for number in (1, num_runs):
        store = store_of(tmp_path / str(number), number)
        requests.clear()
        run = Run(store, store.run_paths("new"))
        run.require_free()
        with run:
            run.load()
        counts.append(sum(requests.values()))
    assert counts[0] == counts[1] > 0
