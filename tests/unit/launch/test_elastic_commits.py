"""Committed states on the driver; ranks continue only after the driver holds them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from processes import in_thread

from hvd_estimators.exceptions import StoreError
from hvd_estimators.launch.service import elastic_state
from hvd_estimators.launch.service.elastic_state import CommitStore, commit, fetch
from hvd_estimators.launch.service.server import DriverService, connect_to_driver

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store() -> CommitStore:
    return CommitStore()


@contextlib.contextmanager
def launched(store: CommitStore) -> Iterator[str]:
    """Serve one launch and yield its address."""
    with DriverService("127.0.0.1") as service, store.serve(service):
        yield service.address


def test_ranks_fetch_the_last_commit_before_their_launch(store: CommitStore) -> None:
    with launched(store) as first:
        assert fetch(first, 0) is None
        commit(first, 0, {"epoch": 1})
        commit(first, 1, "another state")
        commit(first, 0, {"epoch": 2})
        # Early and late ranks of a launch start from the same state.
        assert fetch(first, 0) is None
    with launched(store) as second:
        assert fetch(second, 0) == fetch(second, 0) == {"epoch": 2}
        assert fetch(second, 1) == "another state"
        assert fetch(second, 2) is None
    assert store.count == 3


def test_a_large_state_arrives_unchanged(store: CommitStore) -> None:
    weights = np.random.default_rng(0).integers(0, 256, 64 * 2**20, np.uint8)
    with launched(store) as first:
        commit(first, 0, {"weights": weights, "batch": 3})
    with launched(store) as second:
        found = fetch(second, 0)
    np.testing.assert_array_equal(found["weights"], weights)
    assert found["batch"] == 3


def test_ranks_fetch_a_state_one_after_another(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(store) as first:
        commit(first, 0, "whole")
    send, inside, overlaps = elastic_state._send, threading.Lock(), []

    def send_alone(channel: Any, message: Any, state: bytes = b"") -> None:
        if state and not inside.acquire(blocking=False):
            overlaps.append(state)
            return
        if state:
            time.sleep(0.2)
        send(channel, message, state)
        if state:
            inside.release()

    monkeypatch.setattr(elastic_state, "_send", send_alone)
    with launched(store) as second:
        fetches = [in_thread(lambda: fetch(second, 0)) for _ in range(3)]
        assert [each.result(30) for each in fetches] == ["whole"] * 3
    assert not overlaps


def test_a_partial_state_does_not_replace_a_complete_one(store: CommitStore) -> None:
    with launched(store) as first:
        commit(first, 0, "whole")
        channel = connect_to_driver(first)
        channel.send({"kind": "commit", "state": 0})
        channel._connection.sendall(b"\0\0\0\x06hal")
        channel.close()
    with launched(store) as second:
        assert fetch(second, 0) == "whole"


def test_ranks_of_an_earlier_launch_cannot_commit(store: CommitStore) -> None:
    """As after a network partition, when the ranks of the lost machine still run."""
    with launched(store) as first:
        commit(first, 0, "of the first")
        channel = connect_to_driver(first)
        channel.send({"kind": "commit", "state": 0})
    with launched(store) as second:
        with contextlib.suppress(OSError):
            channel.send({}, b"...")
        with pytest.raises(ConnectionError, match=r"closed|reset"):
            channel.receive(5, 5)
        with pytest.raises(OSError, match="refused"):
            commit(first, 0, "too late")
        secret = first.rpartition(":")[2]
        with pytest.raises(OSError, match=r"does not know|closed"):
            commit(f"{second.rpartition(':')[0]}:{secret}", 0, "in disguise")
        assert fetch(second, 0) == "of the first"
    assert store.count == 1


def test_a_state_that_is_too_large_for_a_message_fails_the_rank(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_state, "_MOST_BYTES", 2**20)
    with launched(store) as first, pytest.raises(StoreError, match=r"less than 4 GiB.*its path"):
        commit(first, 0, bytes(2**20))
    assert store.count == 0
