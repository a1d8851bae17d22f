"""Files of runs that were edited or damaged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_values import JSON_VALUES

from hvd_estimators import Store
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.checkpoints import (
    CheckpointInfo,
    best_checkpoint,
    list_checkpoints,
    write_manifest,
)
from hvd_estimators.store.runs import read_metadata

GOOD = {
    "run_id": "odd",
    "framework": "torch",
    "state": "finished",
    "started": "2026-11-20T10:00:00+00:00",
    "ended": "2026-11-20T10:05:00+00:00",
    "row_order": {"canonical_shards": 2, "random_seed": 1},
    "fingerprint": {"data": "a"},
    "fits": [{"state": "finished", "reading": {}}],
}


def edited(document: dict[str, Any], *further: str) -> st.SearchStrategy[Any]:
    """Return any value, or the document with some values replaced."""
    changes = {name: JSON_VALUES for name in (*document, *further)}
    return JSON_VALUES | st.fixed_dictionaries({}, optional=changes).map(
        lambda some: document | some
    )


LEASE = {
    "machine": "m",
    "pid": 1,
    "started": "s",
    "created": None,
    "beaten": None,
    "is_released": False,
}
HISTORY = {"rows": [[0, "train", "loss", 0.5]]}


def store_with(folder: Path, files: dict[str, bytes]) -> Store:
    """Return a store with a good run, and a run of some files."""
    store = Store.create(str(folder / "store"))
    good = {**GOOD, "run_id": "good", "started": "2026-11-19T10:00:00+00:00"}
    store.write_text(f"{store.run_paths('good').run_path}/metadata.json", json.dumps(good))
    path = Path(store.run_paths("odd").run_path)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return store


@settings(max_examples=150)
@given(
    metadata=edited(GOOD, "error"),
    lease=edited(LEASE),
    history=edited(HISTORY),
)
def test_a_run_of_any_documents_is_listed_beside_the_others(
    metadata: Any, lease: Any, history: Any
) -> None:
    documents = {"metadata.json": metadata, "lease-000001.json": lease, "history.json": history}
    with tempfile.TemporaryDirectory() as folder:
        store = store_with(
            Path(folder), {name: json.dumps(value).encode() for name, value in documents.items()}
        )
        by_folder = {Path(run.path).name: run for run in store.list_runs()}
    assert by_folder.keys() == {"good", "odd"}
    assert by_folder["good"].state == "finished"
    if not isinstance(metadata, dict) or not isinstance(metadata.get("run_id"), str):
        assert by_folder["odd"].state == "damaged"
        assert "metadata.json' is damaged" in (by_folder["odd"].error or "")


MANIFEST = {
    **{"format": 1, "size": 4, "sha256": "a", "epoch": 2, "rows": 0, "framework": "torch"},
    **{"metrics": {"loss": 0.5}, "monitor": "loss", "mode": "min", "files": [["a", 1, "b"]]},
}


@settings(max_examples=150)
@given(edited(MANIFEST))
def test_a_checkpoint_with_any_manifest_is_listed_or_skipped(manifest: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(folder)
        run = store.run_paths("mine")
        first = f"{run.checkpoints_path}/checkpoint-000001"
        store.write_text(f"{first}.ckpt", "good")
        info = CheckpointInfo(f"{first}.ckpt", 4, "b", 1, 0, "torch", {"loss": 1.0}, "loss")
        write_manifest(store, info)
        store.write_text(f"{run.checkpoints_path}/checkpoint-000002.json", json.dumps(manifest))

        good, *others = list_checkpoints(store, run)

    assert good == info
    assert best_checkpoint([good, *others]) in (good, *others)
    for other in others:
        assert other.epoch == 2
        assert all(isinstance(value, float) for value in other.metrics.values())
    # Not of the objects, which are equal for 0 and false.
    if json.dumps(manifest, sort_keys=True) == json.dumps(MANIFEST, sort_keys=True):
        assert len(others) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        json.dumps({**GOOD, "started": "yesterday"}).encode(),
        json.dumps({**GOOD, "fits": ["first"]}).encode(),
        json.dumps({**GOOD, "row_order": {}}).encode(),
        json.dumps({**GOOD, "error": {"class": "OSError"}}).encode(),
    ],
    ids=["empty", "no values", "no text", "lists", "objects", "time", "fits", "order", "error"],
)
def test_damaged_metadata_is_an_error_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    store = store_with(tmp_path, {"metadata.json": content})
    with pytest.raises(StoreError, match=r"odd/metadata\.json' is damaged .* Delete it"):
        read_metadata(store, store.run_paths("odd").run_path)
    newest, damaged = store.list_runs()
    assert (newest.run_id, damaged.run_id, damaged.state) == ("good", "odd", "damaged")


def test_times_without_a_zone_are_in_utc(tmp_path: Path) -> None:
    document = {**GOOD, "started": "2026-11-20T10:00:00"}
    store = store_with(tmp_path, {"metadata.json": json.dumps(document).encode()})
    run, _ = store.list_runs()
    assert run.started.isoformat() == "2026-11-20T10:00:00+00:00"
