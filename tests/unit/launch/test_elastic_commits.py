"""Committed states: what ranks send is on the driver when they go on, and nothing else is."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvd_estimators.exceptions import StoreError, UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.service import elastic_state
from hvd_estimators.launch.service.elastic_state import CommitStore, commit, fetch
from hvd_estimators.launch.service.server import DriverService, connect_to_driver

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store() -> Iterator[CommitStore]:
    with CommitStore() as store:
        yield store


@contextlib.contextmanager
def launched(store: CommitStore) -> Iterator[str]:
    """Serve one launch, at the address that is the value."""
    with DriverService("127.0.0.1") as service, store.serve(service):
        yield service.address


def test_the_last_commit_before_a_launch_is_what_its_ranks_fetch(store: CommitStore) -> None:
    with launched(store) as first:
        assert fetch(first, 0) is None
        commit(first, 0, {"epoch": 1})
        commit(first, 1, "another state")
        commit(first, 0, {"epoch": 2})
        # Whether a rank is early or late, it begins as the others do.
        assert fetch(first, 0) is None
    with launched(store) as second:
        assert fetch(second, 0) == fetch(second, 0) == {"epoch": 2}
        assert fetch(second, 1) == "another state"
        assert fetch(second, 2) is None
    assert store.count == 3


def test_a_large_state_comes_as_it_was_and_is_never_in_memory_twice(store: CommitStore) -> None:
    size = 64 * 2**20
    weights = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    tracemalloc.start()
    try:
        with launched(store) as first:
            before, _ = tracemalloc.get_traced_memory()
            commit(first, 0, {"weights": weights, "batch": 3})
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Both ends are in this process; NumPy makes bytes of an array to pickle it.
    assert peak - before < 1.5 * size
    with launched(store) as second:
        found = fetch(second, 0)
    np.testing.assert_array_equal(found["weights"], weights)
    assert found["batch"] == 3


def test_half_a_state_does_not_take_the_place_of_a_whole_one(store: CommitStore) -> None:
    with launched(store) as first:
        commit(first, 0, "whole")
        channel = connect_to_driver(first)
        channel.send({"kind": "commit", "state": 0})
        channel.send({"kind": "part"}, b"hal")
        channel.close()
    with launched(store) as second:
        assert fetch(second, 0) == "whole"


def test_ranks_of_an_earlier_launch_cannot_commit_any_more(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a machine was cut off, and goes on with what it did."""
    monkeypatch.setattr(timeouts, "COMMIT_RETRY", 0.0)
    with launched(store) as first:
        commit(first, 0, "of the first")
        channel = connect_to_driver(first)
        channel.send({"kind": "commit", "state": 0})
        channel.send({"kind": "part"}, b"...")
    with launched(store) as second:
        with contextlib.suppress(OSError):
            channel.send({"kind": "end"})
        with pytest.raises(ConnectionError, match=r"closed|reset"):
            channel.receive(5, 5)
        with pytest.raises(UnreachableError, match="cannot be reached at 127"):
            commit(first, 0, "too late")
        secret = first.rpartition(":")[2]
        with pytest.raises(UnreachableError, match="cannot be reached"):
            commit(f"{second.rpartition(':')[0]}:{secret}", 0, "in disguise")
        assert fetch(second, 0) == "of the first"
    assert store.count == 1


def test_a_full_disk_is_an_error_in_the_rank_and_leaves_the_commit_before(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(store) as first:
        commit(first, 0, "before")
        monkeypatch.setattr(
            elastic_state, "_unnamed_file", functools.partial(open, "/dev/full", "wb")
        )
        with pytest.raises(StoreError, match=r"No space left on device.*Set TMPDIR"):
            commit(first, 0, bytes(2**20))
    with launched(store) as second:
        assert fetch(second, 0) == "before"


def test_a_driver_that_is_away_for_a_moment_is_waited_for(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "COMMIT_PAUSE", 0.05)
    connect = socket.create_connection
    refusals = [ConnectionRefusedError("refused"), TimeoutError("timed out")]

    def connect_or_not(*arguments: Any, **options: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return connect(*arguments, **options)

    with launched(store) as first:
        monkeypatch.setattr(socket, "create_connection", connect_or_not)
        commit(first, 0, "in the end")
        monkeypatch.undo()
    assert not refusals
    assert store.count == 1


def test_nothing_is_left_behind(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, store: CommitStore
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with launched(store) as first:
        commit(first, 0, bytes(2**20))
        # Without a name: also where the driver is killed, and for nobody else to read.
        assert list(tmp_path.iterdir()) == []
    assert threading.active_count() <= threads + 1
