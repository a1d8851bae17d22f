"""Ownership records in a store, and liveness of owners, with real processes. No Spark."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
from processes import wait_until

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, this_process
from hvd_estimators.store import LocalStore, leases
from hvd_estimators.store.leases import (
    STALE_SECONDS,
    UNREADABLE,
    Heartbeat,
    LeaseRecord,
    is_abandoned,
    read_lease_record,
)

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
    import os, sys, time
    from hvd_estimators import Store
    from hvd_estimators.store import leases

    store, what = Store.create(sys.argv[1]), sys.argv[2]
    leases.HEARTBEAT_SECONDS = 0.02
    heartbeat = leases.Heartbeat(store, sys.argv[1] + "/claim")
    heartbeat.start()
    if what == "forks":
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
        else:
            heartbeat.stop()
            sys.exit()
    print("started", flush=True)
    if what == "watches":
        while not heartbeat.lost:
            time.sleep(0.01)
        print("lost", flush=True)
    sys.stdin.readline()
"""


def start(store, what="waits"):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), store.prefix_path, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout.readline() == "started\n"
    return process


def end(process):
    process.kill()
    process.communicate()


def of_another(claim):
    """Return a claim as if from a process on another machine."""
    return dataclasses.replace(claim, owner=ProcessIdentity("another machine", 1, "1"), token="")


@pytest.fixture
def path(store):
    return f"{store.prefix_path}/claim"


def written_ago(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_claim_is_renewed_until_its_process_ends(store, path):
    process = start(store)
    claim = read_lease_record(store, path)
    assert (claim.owner.pid, claim.owner.machine) == (process.pid, this_process().machine)
    assert str(claim.owner) == f"process {process.pid} on {this_process().host}"
    wait_until(lambda: read_lease_record(store, path).beaten > claim.beaten)
    assert read_lease_record(store, path).created == claim.created
    assert not is_abandoned(store, path, claim)
    process.communicate("\n")
    assert process.returncode == 0
    assert os.listdir(store.prefix_path) == []


def test_killed_local_processes_are_gone_at_once_but_stopped_ones_are_not(store, path):
    process = start(store)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    written_ago(path, 100 * STALE_SECONDS)
    claim = dataclasses.replace(read_lease_record(store, path), beaten=None)
    assert not is_abandoned(store, path, claim)
    process.kill()
    process.wait()
    assert is_abandoned(store, path, claim)
    process.communicate()


def test_remote_processes_are_judged_by_the_age_of_the_heartbeat(store, path):
    process = start(store)
    claim = of_another(read_lease_record(store, path))
    assert not is_abandoned(store, path, claim)
    end(process)
    # A process killed in the middle of a heartbeat also leaves its temporary file.
    left = os.listdir(store.prefix_path)
    assert not is_abandoned(store, path, claim)
    written_ago(path, STALE_SECONDS - 20)
    assert not is_abandoned(store, path, claim)
    written_ago(path, STALE_SECONDS + 1)
    assert is_abandoned(store, path, claim)
    # The probe for the store's time is deleted.
    assert os.listdir(store.prefix_path) == left


class Timeless(LocalStore):
    """Store without modification times."""

    def modified(self, path):
        return None


def test_the_owners_clock_is_used_if_the_store_has_none(tmp_path, path):
    store = Timeless(str(tmp_path / "store"))
    with Heartbeat(store, path):
        claim = of_another(read_lease_record(store, path))
    for seconds, expected in ((STALE_SECONDS - 20, False), (STALE_SECONDS + 1, True)):
        beaten = leases.utc_now() - timedelta(seconds=seconds)
        older = dataclasses.replace(claim, beaten=beaten)
        assert is_abandoned(store, path, older) is expected
    assert not is_abandoned(store, path, dataclasses.replace(claim, beaten=None))


def test_claims_this_process_has_released_are_abandoned(store, path):
    heartbeat = Heartbeat(store, path)
    heartbeat.start()
    claim = read_lease_record(store, path)
    assert not is_abandoned(store, path, claim)
    heartbeat.stop(delete=False)
    assert read_lease_record(store, path) == claim
    assert is_abandoned(store, path, claim)
    heartbeat.beat()
    heartbeat.stop()
    assert not store.exists(path)


@pytest.mark.parametrize("event", ["taken", "deleted", "damaged"])
def test_a_lost_claim_is_neither_written_nor_deleted(store, path, event):
    with Heartbeat(store, path) as heartbeat:
        heartbeat.beat()
        assert not heartbeat.lost
        if event == "deleted":
            store.delete(path)
        else:
            other = LeaseRecord(ProcessIdentity("another", 1, "1"), token="other").to_json()
            store.write_text(path, other if event == "taken" else "{")
        before = store.read(path) if store.exists(path) else None
        heartbeat.beat()
        assert heartbeat.lost
    assert (store.read(path) if store.exists(path) else None) == before


def test_a_process_paused_too_long_notices_its_lost_claim(store, path):
    process = start(store, "watches")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    other = LeaseRecord(this_process(), token="other")
    store.write_text(path, other.to_json())
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "lost\n"
    process.communicate("\n")
    assert read_lease_record(store, path) == other


def test_forked_children_do_not_touch_the_claim(store, path):
    process = start(store, "forks")
    claim = read_lease_record(store, path)
    assert claim.owner.pid == process.pid
    wait_until(lambda: read_lease_record(store, path).beaten > claim.beaten)
    process.communicate("\n")
    assert process.returncode == 0
    assert not store.exists(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"machine": "m", "pid": "x"}'])
def test_corrupted_claims_have_no_owner_but_an_age(store, path, text):
    assert read_lease_record(store, path) is None
    store.write_text(path, text)
    assert read_lease_record(store, path) is UNREADABLE
    assert not is_abandoned(store, path, UNREADABLE)
    written_ago(path, STALE_SECONDS + 1)
    assert is_abandoned(store, path, UNREADABLE)


def test_processes_are_dead_only_if_that_is_certain():
    own = this_process()
    assert own.machine
    assert not is_dead(own)
    assert not is_dead(None)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    other = ProcessIdentity(own.machine, child.pid, started)
    assert not is_dead(other)
    # Another process has the PID of a dead process.
    assert is_dead(dataclasses.replace(other, started="1"))
    assert not is_dead(dataclasses.replace(other, machine="another", started="1"))
    assert not is_dead(dataclasses.replace(other, machine="", started="1"))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(other)  # a zombie, before wait()
    child.wait()
    assert is_dead(other)


def test_an_unavailable_store_costs_only_heartbeats(store, path, monkeypatch, caplog):
    with Heartbeat(store, path) as heartbeat:
        before = read_lease_record(store, path)
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "read", lambda *_: (_ for _ in ()).throw(OSError("gone")))
            heartbeat.beat()
        assert "gone" in caplog.text
        assert read_lease_record(store, path) == before
        heartbeat.beat()
        assert not heartbeat.lost
        assert read_lease_record(store, path).beaten > before.beaten
