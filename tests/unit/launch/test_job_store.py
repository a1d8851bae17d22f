"""The job's store: Gloo's keys, failures, and lost ranks."""

import threading

import pytest

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.server import Failure, JobStore

pytestmark = pytest.mark.timeout(30)


def make_store(ranks=2):
    store = JobStore()
    store.expect([f"host-{rank}" for rank in range(ranks)])
    return store


def tell(store, kind, rank=0, body=b"", **values):
    return store.handle({"kind": kind, "rank": rank, **values}, body)


def status(store, *args, **values):
    return tell(store, *args, **values)[0]["status"]


def test_a_key_exists_until_it_is_deleted(monkeypatch):
    monkeypatch.setattr(timeouts, "RENDEZVOUS_KEY", 0.1)
    store = make_store()
    place, keys = {"scope": "global", "key": "0"}, {"scope": "global", "keys": ["0"]}
    assert tell(store, "get", rank=1, **keys) == ({"status": 404}, b"")

    assert status(store, "set", body=b"\0\xff", **place) == 200
    assert tell(store, "get", rank=1, **keys) == ({"status": 200}, b"\0\xff")
    assert status(store, "get", rank=1, scope="local_a", keys=["0"]) == 404

    assert status(store, "delete", **place) == 200
    assert status(store, "get", rank=1, **keys) == 404
    assert status(store, "delete", **place) == 200


def test_a_waiting_rank_gets_a_key_when_it_is_set(monkeypatch):
    monkeypatch.setattr(timeouts, "RENDEZVOUS_KEY", 20.0)
    store = make_store()
    got = []
    waiting = threading.Thread(
        target=lambda: got.append(tell(store, "get", rank=1, scope="global", keys=["0"]))
    )
    waiting.start()
    waiting.join(0.2)
    assert not got
    tell(store, "set", body=b"here", scope="global", key="0")
    waiting.join()
    assert got == [({"status": 200}, b"here")]


def test_a_rank_gets_its_part_of_each_value(monkeypatch):
    monkeypatch.setattr(timeouts, "RENDEZVOUS_KEY", 0.1)
    store = make_store(4)
    for rank in (0, 1, 3):
        parts = [f"{rank}>{other}" for other in range(4) if other != rank]
        tell(store, "set", rank, "".join(parts).encode(), scope="global", key=str(rank))
    place = {"scope": "global", "count": 4}
    assert tell(store, "get_parts", 2, key="2", **place) == ({"status": 200}, b"0>21>23>2")
    assert tell(store, "get_parts", 0, key="0", **place) == ({"status": 404}, b"")
    tell(store, "set", 2, b"2>02>12>3", scope="global", key="2")
    assert tell(store, "get_parts", 0, key="0", **place) == ({"status": 200}, b"1>02>03>0")


def test_the_first_failure_is_reported_to_all():
    store = make_store(3)
    assert tell(store, "alive", rank=2)[0]["failure"] is None

    tell(store, "failed", rank=1, host="host-1", why="had failed (ValueError: no)")
    tell(store, "failed", rank=0, host="host-0", why="had failed (after it)")

    told = tell(store, "alive", rank=2)[0]["failure"]
    assert str(Failure(**told)) == "rank 1 on host-1 had failed (ValueError: no)"


def test_a_rank_is_lost_unless_it_is_done():
    store = make_store(3)
    tell(store, "done", rank=1)
    store.lose(1, "has closed its connection")
    store.lose(-1, "has closed its connection")
    assert store.failure() is None

    store.lose(2, "has closed its connection")
    assert store.failure() == Failure(2, "host-2", "has closed its connection", lost=True)


def test_a_rank_that_never_sends_a_message_is_lost():
    store = make_store(3)
    tell(store, "alive", rank=1)
    store.lose_unheard("has not been heard of")
    assert store.failure() == Failure(2, "host-2", "has not been heard of", lost=True)


@pytest.mark.parametrize("ending", ["done", "lost"])
def test_wait_for_all_ends_when_each_rank_is_done_or_lost(ending):
    store = make_store(3)
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(store.wait_for_all()))
    waiting.start()
    tell(store, "done", rank=0)
    tell(store, "done", rank=2)
    waiting.join(0.2)
    assert not ended
    if ending == "done":
        tell(store, "done", rank=1)
    else:
        store.lose(1, "has closed its connection")
    waiting.join(10)
    assert ended == [[] if ending == "done" else [1]]
