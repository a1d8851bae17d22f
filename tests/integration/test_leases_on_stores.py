"""Leases, listings and deletion of runs on stores without local files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from hvd_estimators import Store
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.leases import FencingToken, Lease, holder, newest_lease
from hvd_estimators.store.runs import history_text, run_file

pytestmark = pytest.mark.integration

FIRST = [(0, "train", "loss", 0.5), (0, "validation", "loss", float("nan"))]


@pytest.mark.parametrize("kind", ["hdfs", "s3"])
def test_a_run_has_one_holder_and_can_be_listed_and_deleted(
    request: pytest.FixtureRequest, kind: str
) -> None:
    server = request.getfixturevalue(kind)
    options = {"storage_options": server.storage_options} if kind == "s3" else {}
    store = Store.create(f"{server.url}/leases", **options)
    run, number = store.run_paths("mine"), 4
    notes = {"framework": "torch", "started": "2026-01-01T00:00:00+00:00"}
    for run_id, state in (("mine", "running"), ("other", "finished")):
        path = store.run_paths(run_id).run_path
        text = json.dumps({**notes, "run_id": run_id, "state": state})
        store.write_text(run_file(path, "metadata"), text)
    store.write_text(run_file(run.run_path, "history"), history_text(FIRST))
    start, everybody_tried = threading.Barrier(number), threading.Barrier(number + 1)
    looked: list[str] = []
    refused: list[str] = []

    def take() -> None:
        start.wait(60)
        try:
            with Lease(store, run):
                looked.append(next(r.state for r in store.list_runs() if r.run_id == "mine"))
                everybody_tried.wait(60)
        except ParamError as error:
            refused.append(str(error))
            everybody_tried.wait(60)

    threads = [threading.Thread(target=take) for _ in range(number)]
    for thread in threads:
        thread.start()
    everybody_tried.wait(60)
    for thread in threads:
        thread.join(60)

    assert (looked, len(refused)) == (["running"], number - 1)
    assert holder(store, run.run_path)[1] is None
    states = {info.run_id: (info.state, info.epochs) for info in store.list_runs()}
    assert states == {"mine": ("interrupted", 1), "other": ("finished", 0)}
    assert store.load_history("mine")["value"].isna().tolist() == [False, True]
    store.delete_run("mine")
    assert [info.run_id for info in store.list_runs()] == ["other"]


@pytest.mark.parametrize("kind", ["local", "hdfs", "s3"])
def test_a_driver_whose_write_is_late_does_not_train(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = None if kind == "local" else request.getfixturevalue(kind)
    url = str(tmp_path) if server is None else f"{server.url}/late"
    options = server.storage_options if kind == "s3" else {}
    late, other = (Store.create(url, storage_options=options) for _ in range(2))
    wrote, may_write = threading.Event(), threading.Event()
    create = late._create

    def create_late(path: str, content: bytes) -> None:
        wrote.set()
        assert may_write.wait(60)
        create(path, content)

    monkeypatch.setattr(late, "_create", create_late)
    run, refused = late.run_paths("mine"), list[ParamError]()

    def take() -> None:
        try:
            with Lease(late, run):
                pass
        except ParamError as error:
            refused.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert wrote.wait(60)
    with Lease(other, run) as lease:
        may_write.set()
        thread.join(60)
        (error,) = refused
        assert "is being trained by another fit" in str(error)
        FencingToken(run.run_path, lease.generation, lease.token).check(other)
        assert newest_lease(other, run.run_path)[0] == 1
