"""Leases of runs: one fit at a time over all processes, with expiry."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators._util.process_identity import this_process
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store import FilesystemStore, LocalStore, leases
from hvd_estimators.store.leases import (
    STALE_SECONDS,
    Heartbeat,
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


def path_of(store: Any) -> str:
    return lease_path(store.run_paths("mine").run_path)


def test_a_run_is_rejected_while_another_process_trains_it(
    store: Any, other: subprocess.Popen[str]
) -> None:
    run = store.run_paths("mine")
    message = (
        rf"run_id: 'mine' is being trained by process {other.pid} on \S+ since \d+-.* UTC \(last "
        r"heartbeat .*\).* Set another run_id, or none, or wait .*lease.json' is deleted"
    )
    for _ in range(2):
        with pytest.raises(ParamError, match=message), Lease(store, run):
            pass
    with pytest.raises(ParamError, match=message):
        Lease(store, run).require_free()
    claim = read_lease_record(store, path_of(store))
    assert claim is not None
    assert claim.owner.pid == other.pid
    # Another run is free.
    with Lease(store, store.run_paths("another")):
        pass
    assert other.communicate("\n", timeout=60)[0] == "ended\n"
    assert not store.exists(path_of(store))
    Lease(store, run).require_free()


def test_killed_processes_hold_no_lease(
    store: Any, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.0)
    os.kill(other.pid, signal.SIGKILL)
    other.wait(60)
    assert store.exists(path_of(store))
    run = store.run_paths("mine")
    Lease(store, run).require_free()
    with Lease(store, run) as taken:
        taken.confirm()
        claim = holder(store, run.run_path)
        assert claim is not None
        assert claim.owner.pid == os.getpid()
    assert not store.exists(path_of(store))


def leave_lease_of_another_machine(store: Any, seconds_ago: float) -> None:
    now = datetime.now(UTC)
    owner = dataclasses.replace(this_process(), machine="elsewhere", host="node7")
    claim = LeaseRecord(owner, now, now, "token")
    store.write_text(path_of(store), claim.to_json())
    path = Path(path_of(store))
    moment = path.stat().st_mtime - seconds_ago
    os.utime(path, (moment, moment))


def test_a_remote_lease_expires_without_heartbeats(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.0)
    run = store.run_paths("mine")
    leave_lease_of_another_machine(store, STALE_SECONDS - 100)
    with pytest.raises(ParamError, match=r"by process \d+ on node7 .* free 5 minutes after"):
        Lease(store, run).require_free()
    leave_lease_of_another_machine(store, STALE_SECONDS + 100)
    with Lease(store, run) as taken:
        taken.confirm()
    assert not store.exists(path_of(store))


def test_patient_leases_wait_until_a_remote_holder_is_gone_or_beats(
    store: Any, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slept = store.run_paths("mine"), list[float]()
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.0)
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
        claim = read_lease_record(store, path_of(store))
        assert claim is not None
        assert claim.owner.pid == os.getpid()
    assert slept == [5.0] * 3

    def beat(seconds: float) -> None:
        leave_lease_of_another_machine(store, 0)

    clock.sleep = beat
    leave_lease_of_another_machine(store, STALE_SECONDS - 100)
    with pytest.raises(ParamError, match="on node7"):
        Lease(store, run, patient=True).require_free()


def test_corrupted_leases_are_judged_by_their_age(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.0)
    run, path = store.run_paths("mine"), path_of(store)
    store.write_text(path, "{")
    with pytest.raises(ParamError, match="'mine' is being trained by"):
        Lease(store, run).require_free()
    os.utime(path, (1, 1))
    with Lease(store, run):
        assert json.loads(Path(path).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("remote", [False, True])
def test_only_one_of_several_concurrent_fits_gets_the_lease(
    tmp_path: Path, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = FilesystemStore(f"memory://{tmp_path}") if remote else LocalStore(str(tmp_path))
    run, number = store.run_paths("mine"), 8
    start, looked, got = threading.Barrier(number), threading.Barrier(number), []
    everybody_tried, refused = threading.Barrier(number), []
    if remote:
        # The worst case: all of them read before any of them writes.
        require_free = Lease.require_free

        def look(lease: Lease) -> None:
            require_free(lease)
            looked.wait(60)

        monkeypatch.setattr(Lease, "require_free", look)

    def take() -> None:
        start.wait(60)
        try:
            with Lease(store, run) as taken:
                taken.confirm()
                got.append(threading.get_ident())
                everybody_tried.wait(60)
        except ParamError as error:
            refused.append(str(error))
            everybody_tried.wait(60)

    threads = [threading.Thread(target=take) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(got), len(refused)) == (1, number - 1)
    assert not store.exists(path_of(store))


def test_exclusive_creation_works_without_hard_links(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{store.prefix_path}/new/file"
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError))
        assert store.write_new(path, "größe")
        assert not store.write_new(path, "2")
    assert not store.write_new(path, "3")
    assert store.read(path).decode() == "größe"
    assert os.listdir(f"{store.prefix_path}/new") == ["file"]


def test_a_second_thread_is_rejected_before_the_first_heartbeat(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = store.run_paths("mine")
    real = Heartbeat.start

    def start(self: Heartbeat) -> None:
        with pytest.raises(ParamError, match="by another fit of this application"):
            Lease(store, run).require_free()
        real(self)

    monkeypatch.setattr(Heartbeat, "start", start)
    with Lease(store, run):
        pass
    assert not store.exists(path_of(store))
