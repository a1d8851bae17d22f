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
from hvd_estimators.launch.rendezvous.channel import Channel
from hvd_estimators.launch.service import elastic_state
from hvd_estimators.launch.service.elastic_state import COMMITS_VARIABLE, CommitStore, commit, fetch

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store() -> Iterator[CommitStore]:
    with CommitStore() as store:
        yield store


def target(variables: dict[str, str]) -> str:
    return variables[COMMITS_VARIABLE]


def opened(where: str) -> tuple[socket.socket, Channel]:
    host, port, secret = where.rsplit(":", 2)
    connection = socket.create_connection((host, int(port)), 5)
    return connection, Channel.connect(connection, bytes.fromhex(secret), 5)


def test_the_last_commit_before_a_launch_is_what_its_ranks_fetch(store: CommitStore) -> None:
    with store.serve("127.0.0.1") as first:
        assert fetch(target(first), 0) is None
        commit(target(first), 0, {"epoch": 1})
        commit(target(first), 1, "another state")
        commit(target(first), 0, {"epoch": 2})
        # Whether a rank is early or late, it begins as the others do.
        assert fetch(target(first), 0) is None
    with store.serve("127.0.0.1") as second:
        assert fetch(target(second), 0) == fetch(target(second), 0) == {"epoch": 2}
        assert fetch(target(second), 1) == "another state"
        assert fetch(target(second), 2) is None
    assert store.count == 3


def test_a_large_state_comes_as_it_was_and_is_never_in_memory_twice(store: CommitStore) -> None:
    size = 64 * 2**20
    weights = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    tracemalloc.start()
    try:
        with store.serve("127.0.0.1") as first:
            before, _ = tracemalloc.get_traced_memory()
            commit(target(first), 0, {"weights": weights, "batch": 3})
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Both ends are in this process; NumPy makes bytes of an array to pickle it.
    assert peak - before < 1.5 * size
    with store.serve("127.0.0.1") as second:
        found = fetch(target(second), 0)
    np.testing.assert_array_equal(found["weights"], weights)
    assert found["batch"] == 3


def test_half_a_state_does_not_take_the_place_of_a_whole_one(store: CommitStore) -> None:
    with store.serve("127.0.0.1") as first:
        commit(target(first), 0, "whole")
        connection, channel = opened(target(first))
        channel.send({"kind": "commit", "state": 0})
        channel.send({"kind": "part"}, b"hal")
        connection.close()
    with store.serve("127.0.0.1") as second:
        assert fetch(target(second), 0) == "whole"


def test_ranks_of_an_earlier_launch_cannot_commit_any_more(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a machine was cut off, and goes on with what it did."""
    monkeypatch.setattr(elastic_state, "_PATIENCE_SECONDS", 0.0)
    with store.serve("127.0.0.1") as first:
        commit(target(first), 0, "of the first")
        _, channel = opened(target(first))
        channel.send({"kind": "commit", "state": 0})
        channel.send({"kind": "part"}, b"...")
    with store.serve("127.0.0.1") as second:
        with contextlib.suppress(OSError):
            channel.send({"kind": "end"})
        with pytest.raises(ConnectionError, match=r"closed|reset"):
            channel.receive(5, 5)
        with pytest.raises(UnreachableError, match="cannot be reached at 127"):
            commit(target(first), 0, "too late")
        secret = target(first).rpartition(":")[2]
        with pytest.raises(UnreachableError, match="cannot be reached"):
            commit(f"{target(second).rpartition(':')[0]}:{secret}", 0, "in disguise")
        assert fetch(target(second), 0) == "of the first"
    assert store.count == 1


def test_a_full_disk_is_an_error_in_the_rank_and_leaves_the_commit_before(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.serve("127.0.0.1") as first:
        commit(target(first), 0, "before")
        monkeypatch.setattr(
            elastic_state, "_unnamed_file", functools.partial(open, "/dev/full", "wb")
        )
        with pytest.raises(StoreError, match=r"No space left on device.*Set TMPDIR"):
            commit(target(first), 0, bytes(2**20))
    with store.serve("127.0.0.1") as second:
        assert fetch(target(second), 0) == "before"


def test_a_driver_that_is_away_for_a_moment_is_waited_for(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_state, "_PAUSE_SECONDS", 0.05)
    connect = socket.create_connection
    refusals = [ConnectionRefusedError("refused"), TimeoutError("timed out")]

    def connect_or_not(*arguments: Any, **options: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return connect(*arguments, **options)

    with store.serve("127.0.0.1") as first:
        monkeypatch.setattr(socket, "create_connection", connect_or_not)
        commit(target(first), 0, "in the end")
        monkeypatch.undo()
    assert not refusals
    assert store.count == 1


def test_nothing_is_left_behind(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, store: CommitStore
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with store.serve("127.0.0.1") as first:
        commit(target(first), 0, bytes(2**20))
        # Without a name: also where the driver is killed, and for nobody else to read.
        assert list(tmp_path.iterdir()) == []
    assert threading.active_count() <= threads + 1
