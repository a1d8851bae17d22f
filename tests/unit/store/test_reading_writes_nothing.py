"""Functions that read a store leave it as it is, also for a moment. No Spark."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from prepared_sets import Writer
from saved_checkpoints import save

from hvd_estimators import (
    get_dataset_properties,
    list_prepared_data,
    load_checkpoint,
    plot_histories,
)
from hvd_estimators._util.process_identity import ProcessIdentity
from hvd_estimators.store import LocalStore, Store
from hvd_estimators.store.leases import STALE_SECONDS, Heartbeat, lease_path

INDEX = "0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with prepared data and a run that another machine trains."""
    store = LocalStore(str(tmp_path / "store"))
    save(store, 1, 2)
    run = Path(store.run_paths("mine").run_path)
    metadata = {"run_id": "mine", "framework": "torch", "state": "running"}
    (run / "metadata.json").write_text(json.dumps(metadata))
    (run / "history.json").write_text('{"columns": [], "rows": [[0, "train", "loss", 1.0]]}')
    record = Heartbeat(store, "")._record
    elsewhere = ProcessIdentity("another machine", 1, "1")
    Path(lease_path(str(run), 1)).write_text(dataclasses.replace(record, owner=elsewhere).to_json())
    Writer(store)(INDEX)
    return store


READERS = {
    "list_runs": lambda store: store.list_runs(),
    "load_history": lambda store: store.load_history("mine"),
    "plot_histories": lambda store: plot_histories(store, ["mine"]),
    "load_checkpoint": lambda store: load_checkpoint(store, run_id="mine", safe=False),
    "list_prepared_data": list_prepared_data,
    "get_dataset_properties": lambda store: get_dataset_properties(INDEX, store),
    "read": lambda store: [store.read(path) for path in store.find(store.prefix_path)],
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reading_writes_nothing(store: Store, read: Any) -> None:
    before = tree(store)
    assert read(store) is not None
    # A file that was written and deleted again changes the time of its folder.
    assert tree(store) == before


def tree(store: Store) -> dict[str, Any]:
    root = Path(store.folder)
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in (root, *root.rglob("*"))
    }


@pytest.mark.parametrize(("age", "state"), [(0, "running"), (STALE_SECONDS + 1, "interrupted")])
def test_the_age_of_another_machines_heartbeat_tells_the_state(
    store: Store, age: float, state: str
) -> None:
    path = lease_path(store.run_paths("mine").run_path, 1)
    then = os.stat(path).st_mtime - age
    os.utime(path, (then, then))
    assert [run.state for run in store.list_runs()] == [state]
