"""Leases of runs: one fit at a time over all processes, with expiry."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hvd_estimators._util.process_identity import this_process
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import FilesystemStore, LocalStore, leases
from hvd_estimators.store.leases import (
    STALE_SECONDS,
    Lease,
    LeaseRecord,
    holder,
    lease_path,
    read_lease_record,
)

HOLDER = """
import sys
from hvd_estimators import Store
from hvd_estimators.store.leases import Lease
store = Store.create(sys.argv[1])
with Lease(store, store.run_paths("mine")):
    print("held", flush=True)
    sys.stdin.readline()
print("ended", flush=True)
"""


@pytest.fixture
def other(store: Any) -> Iterator[subprocess.Popen[str]]:
    """Process that holds the lease until it reads a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, store.prefix_path], **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def path_of(store: Any, generation: int = 1) -> str:
    return lease_path(store.run_paths("mine").run_path, generation)


def files_of(store: Any) -> list[str]:
    """Return the files of the run, which holds something else than its lease."""
    return [name for name in store.names(store.run_paths("mine").run_path) if name != "metadata"]


@pytest.fixture
def used(store: Any) -> None:
    """Give the run another file."""
    store.write_text(f"{store.run_paths('mine').run_path}/metadata", "")


def test_a_run_is_rejected_while_another_process_trains_it(
    store: Any, other: subprocess.Popen[str]
) -> None:
    run = store.run_paths("mine")
    message = (
        rf"run_id: 'mine' is being trained by process {other.pid} on \S+ since \d+-.* UTC \(last "
        r"heartbeat .*\).* Set another run_id, or none, or wait .*lease-000001.json' is deleted"
    )
    for _ in range(2):
        with pytest.raises(ParamError, match=message), Lease(store, run):
            pass
    with pytest.raises(ParamError, match=message):
        Lease(store, run).require_free()
    claim = read_lease_record(store, path_of(store))
    assert claim is not None
    assert claim.owner.pid == other.pid
    assert files_of(store) == ["lease-000001.json"]
    # Another run is free.
    with Lease(store, store.run_paths("another")):
        pass
    assert other.communicate("\n", timeout=60)[0] == "ended\n"
    # A run that has no other files has no lease, either.
    assert not store.exists(run.run_path) or files_of(store) == []
    assert Lease(store, run).require_free() == 0


def test_killed_processes_hold_no_lease(
    store: Any, other: subprocess.Popen[str], used: None
) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait(60)
    assert store.exists(path_of(store))
    run = store.run_paths("mine")
    Lease(store, run).require_free()
    with Lease(store, run) as taken:
        claim = holder(store, run.run_path)[1]
        assert claim is not None
        assert claim.owner.pid == os.getpid()
        assert taken.generation == 2
        assert files_of(store) == ["lease-000002.json"]
    # The released run stays numbered.
    assert holder(store, run.run_path)[1] is None
    assert files_of(store) == ["lease-000003.json"]
    assert Lease(store, run).require_free() == 3


def leave_lease_of_another_machine(store: Any, seconds_ago: float) -> None:
    now = datetime.now(UTC)
    owner = dataclasses.replace(this_process(), machine="elsewhere", host="node7")
    claim = LeaseRecord(owner, now, now, "token")
    store.write_text(path_of(store), claim.to_json())
    path = Path(path_of(store))
    moment = path.stat().st_mtime - seconds_ago
    os.utime(path, (moment, moment))


def test_a_remote_lease_expires_without_heartbeats(store: Any) -> None:
    run = store.run_paths("mine")
    leave_lease_of_another_machine(store, STALE_SECONDS - 100)
    with pytest.raises(ParamError, match=r"by process \d+ on node7 .* free 5 minutes after"):
        Lease(store, run).require_free()
    leave_lease_of_another_machine(store, STALE_SECONDS + 100)
    with Lease(store, run) as taken:
        assert taken.generation == 2
    assert not store.exists(path_of(store))


def test_patient_leases_wait_until_a_remote_holder_is_gone_or_beats(
    store: Any, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slept = store.run_paths("mine"), list[float]()
    # A holder on this machine is known to live.
    with pytest.raises(ParamError, match=f"by process {other.pid}"):
        Lease(store, run, patient=True).require_free()

    def age(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            path = Path(path_of(store))
            os.utime(path, (path.stat().st_mtime - 200,) * 2)

    clock = SimpleNamespace(sleep=age, monotonic=time.monotonic)
    monkeypatch.setattr(leases, "time", clock)
    leave_lease_of_another_machine(store, STALE_SECONDS - 100)
    with Lease(store, run, patient=True):
        claim = read_lease_record(store, path_of(store, 2))
        assert claim is not None
        assert claim.owner.pid == os.getpid()
    assert slept == [5.0] * 3

    def beat(seconds: float) -> None:
        leave_lease_of_another_machine(store, 0)

    clock.sleep = beat
    leave_lease_of_another_machine(store, STALE_SECONDS - 100)
    with pytest.raises(ParamError, match="on node7"):
        Lease(store, run, patient=True).require_free()


def test_storage_that_replaces_files_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store: Any = FilesystemStore(f"memory://{tmp_path}")
    store.check_data()
    assert not caplog.records
    pipe_file = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda *args, mode: pipe_file(*args, mode="overwrite")
    )
    store.check_data()
    assert "replaces a file that should only be created" in caplog.text
    assert store.names(store.prefix_path) == []


def no_links(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_exclusive_creation_works_without_hard_links(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{store.prefix_path}/new/file"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        assert store.write_new(path, "größe")
        assert not store.write_new(path, "2")
    assert not store.write_new(path, "3")
    assert store.read(path).decode() == "größe"
    assert os.listdir(f"{store.prefix_path}/new") == ["file"]


def test_a_file_that_could_not_be_written_without_hard_links_is_deleted(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{store.prefix_path}/new/file"
    with monkeypatch.context() as patch:

        def fill_disk(*_: Any) -> None:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
            no_links()

        patch.setattr(os, "link", fill_disk)
        with contextlib.ExitStack() as stack, pytest.raises(OSError, match="File too large"):
            store._create(path, b"1")
    assert os.listdir(f"{store.prefix_path}/new") == []
    assert store.write_new(path, "2")


def test_a_second_thread_is_rejected_before_the_first_heartbeat(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.run_paths("mine")
    take = Lease._take
    taken: list[bool] = []

    def take_and_look(self: Lease, generation: int) -> bool:
        taken.append(take(self, generation))
        with pytest.raises(ParamError, match="by another fit of this application"):
            Lease(store, run).require_free()
        return taken[-1]

    monkeypatch.setattr(Lease, "_take", take_and_look)
    with Lease(store, run):
        pass
    assert taken == [True]
    assert not store.exists(path_of(store))


class Outdated(LocalStore):
    """Store whose listings are old."""

    def names(self, path: str) -> list[str]:
        return []


def test_a_store_with_old_listings_is_an_error(tmp_path: Path) -> None:
    store = Outdated(str(tmp_path))
    with pytest.raises(StoreError, match=r"lease-000001.json', and does not list it"):
        Lease(store, store.run_paths("mine")).start()
