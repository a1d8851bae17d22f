"""Damaged documents of a run, as fits and readers meet them: errors that name the file."""

from __future__ import annotations

import datetime
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from json_values import (
    JSON_VALUES,
    NO_JSON,
    Effort,
    damaged_bytes,
    edited_anywhere,
    efforts,
    fuzz,
    typed_outcome,
)

from hvd_estimators import Store
from hvd_estimators._util.process_identity import this_process
from hvd_estimators.fitting.run import Run
from hvd_estimators.store.checkpoints import (
    CheckpointInfo,
    best_checkpoint,
    find_newest_valid,
    list_checkpoints,
    open_valid,
    write_manifest,
)
from hvd_estimators.store.leases import FencingToken, Lease, LeaseRecord, holder, lease_path
from hvd_estimators.store.runs import load_history, run_file

METADATA = {
    "run_id": "mine",
    "framework": "torch",
    "state": "running",
    "started": "2026-11-20T10:00:00+00:00",
    "row_order": {"canonical_shards": 2, "random_seed": 1, "row_bytes": 0},
    "fingerprint": {"data": {"rows": 3}, "model": {"weights": "a"}, "settings": {"shuffle": True}},
    "fits": [{"state": "finished", "reading": {"files": ["a"]}}],
}
MOMENTS = st.datetimes(timezones=st.timezones() | st.none()).map(lambda moment: moment.isoformat())
EDGES = st.sampled_from(["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-11-20"])


def documents(document: dict[str, Any], *times: str) -> st.SearchStrategy[bytes]:
    """Return contents of a file that holds a document: edited, damaged, or of other times."""
    text = json.dumps(document).encode()
    timed = st.fixed_dictionaries(dict.fromkeys(times, MOMENTS | EDGES)).map(
        lambda some: json.dumps({**document, **some}).encode()
    )
    return (
        edited_anywhere(document).map(lambda found: json.dumps(found).encode())
        | damaged_bytes(text)
        | timed
        | st.sampled_from(NO_JSON)
    )


def check_listed(store: Store) -> None:
    """Check that the damaged run is listed beside another one."""
    good = {**METADATA, "run_id": "good", "state": "finished"}
    store.write_text(run_file(store.run_paths("good").run_path, "metadata"), json.dumps(good))
    by_folder = {Path(run.path).name: run for run in store.list_runs()}
    assert by_folder.keys() == {"good", "mine"}
    assert by_folder["good"].state == "finished"
    damaged = by_folder["mine"]
    assert damaged.state != "damaged" or "metadata.json' is damaged" in (damaged.error or "")


@pytest.mark.parametrize("effort", efforts(150))
def test_a_run_of_any_metadata_is_resumed_or_the_file_is_named(
    effort: Effort, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    paths = store.run_paths("mine")
    info = CheckpointInfo(f"{paths.checkpoints_path}/checkpoint-000001.ckpt", 1, "b", 1, 0, "x", {})
    store.write_text(info.path, "1")
    write_manifest(store, info)

    def check(content: bytes) -> None:
        path = Path(run_file(paths.run_path, "metadata"))
        path.write_bytes(content)
        check_listed(store)
        run = typed_outcome(Run(store, paths).load, str(path))
        if run is None:
            assert {each.state for each in store.list_runs()} == {"damaged", "finished"}
            return
        order = typed_outcome(lambda: run.row_order, str(path))
        assert order is None or isinstance(order.random_seed, int)
        typed_outcome(run.check_fingerprint, "run_id")

    fuzz(check, documents(METADATA, "started", "ended"), effort)


LEASE = json.loads(
    LeaseRecord(
        this_process(),
        datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC),
        datetime.datetime(2026, 11, 20, tzinfo=datetime.UTC),
        "token",
        False,
    ).to_json()
)


@pytest.mark.parametrize("effort", efforts(100))
def test_a_lease_of_any_content_is_taken_or_the_fit_is_rejected(
    effort: Effort, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    paths = store.run_paths("mine")
    path = Path(paths.run_path, "lease-000001.json")
    path.parent.mkdir(parents=True)
    assert lease_path(paths.run_path, 1) == str(path)
    pids = JSON_VALUES.map(lambda value: json.dumps({**LEASE, "pid": value}).encode())

    def check(content: bytes) -> None:
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        path.write_bytes(content)
        store.write_text(run_file(paths.run_path, "metadata"), json.dumps(METADATA))
        check_listed(store)
        holder(store, paths.run_path)
        typed_outcome(Lease(store, paths).require_free, "mine")
        for token in (FencingToken(paths.run_path, launch, "token") for launch in (0, 1)):
            typed_outcome(partial(token.check, store), "mine")
        with_lease = Lease(store, paths)
        if typed_outcome(with_lease.__enter__, "mine") is not None:
            with_lease.__exit__()

    fuzz(check, documents(LEASE, "created", "beaten") | pids, effort)


HISTORY = {"columns": ["epoch"], "rows": [[0, "train", "loss", 0.5], [0, "train", "acc", "nan"]]}


@pytest.mark.parametrize("effort", efforts(100))
def test_a_history_of_any_content_is_read_or_the_file_is_named(
    effort: Effort, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    path = Path(run_file(store.run_paths("mine").run_path, "history"))
    store.write_text(str(path.with_name("metadata.json")), json.dumps(METADATA))

    def check(content: bytes) -> None:
        path.write_bytes(content)
        check_listed(store)
        typed_outcome(lambda: load_history(store, "mine"), str(path))

    fuzz(check, documents(HISTORY), effort)


MANIFEST = {
    **{"format": 1, "size": 4, "sha256": "a", "epoch": 2, "rows": 0, "framework": "torch"},
    **{"metrics": {"loss": 0.5}, "monitor": "loss", "mode": "min"},
}


@pytest.mark.parametrize("effort", efforts(100))
def test_a_checkpoint_with_any_manifest_is_passed_over_for_the_one_before(
    effort: Effort, tmp_path: Path
) -> None:
    store = Store.create(str(tmp_path))
    run = store.run_paths("mine")
    first = f"{run.checkpoints_path}/checkpoint-000001"
    store.write_text(f"{first}.ckpt", "good")
    digest = "770e607624d689265ca6c44884d0807d9b054d23c473c106c72be9de08b7376c"  # of "good"
    good = CheckpointInfo(f"{first}.ckpt", 4, digest, 1, 0, "torch", {"loss": 1.0}, "loss")
    write_manifest(store, good)
    store.write_text(f"{run.checkpoints_path}/checkpoint-000002.ckpt", "other")

    def look(info: CheckpointInfo) -> bytes:
        with open_valid(store, info) as file:
            return file.read()

    def check(content: bytes) -> None:
        Path(f"{run.checkpoints_path}/checkpoint-000002.json").write_bytes(content)
        assert find_newest_valid(store, run, look) == (good, b"good")
        best_checkpoint(list_checkpoints(store, run))

    fuzz(check, documents(MANIFEST), effort)


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
NUMBERS = st.integers() | st.sampled_from([10**30, 0])


@pytest.mark.parametrize("effort", efforts(100))
def test_files_of_any_name_among_checkpoints_are_ignored(effort: Effort, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    run = store.run_paths("mine")
    folder = Path(run.checkpoints_path or "")
    folder.mkdir(parents=True)
    alike = st.tuples(
        st.sampled_from(["checkpoint-{}.ckpt", "checkpoint-{}.json", "checkpoint-{}-{}.ckpt"]),
        NUMBERS,
        NUMBERS,
    ).map(lambda some: some[0].format(*some[1:]))

    def check(name: str) -> None:
        if name in (".", "..") or len(name.encode()) > 200:
            return
        (folder / name).touch()
        try:
            assert list_checkpoints(store, run) == []
            typed_outcome(Run(store, run).load, "mine")
        finally:
            (folder / name).unlink()

    fuzz(check, NAMES | alike, effort)


def test_times_without_a_zone_are_in_utc(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    document = {**METADATA, "started": "2026-11-20T10:00:00"}
    store.write_text(run_file(store.run_paths("mine").run_path, "metadata"), json.dumps(document))
    (run,) = store.list_runs()
    assert run.started.isoformat() == "2026-11-20T10:00:00+00:00"
