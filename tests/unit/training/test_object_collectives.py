"""Exchange of objects between ranks; unauthenticated objects are not unpickled."""

import hmac
import threading

import cloudpickle
import numpy as np
import pytest

from hvd_estimators.launch.rendezvous.channel import RANKS_KEY_VARIABLE, new_secret, ranks_key
from hvd_estimators.training.object_collectives import ObjectExchange

pytestmark = pytest.mark.timeout(30)

LENGTH_BYTES, TAG_BYTES = 8, 32
SEAL_BYTES = LENGTH_BYTES + TAG_BYTES


@pytest.fixture(autouse=True)
def key(monkeypatch):
    ((name, value),) = ranks_key(new_secret()).items()
    monkeypatch.setenv(name, value)
    return value.encode()


class Ranks:
    """Threads in the same collectives, whose messages a test can change."""

    def __init__(self, size, change=lambda name, rank, document: document):
        self.size, self._change = size, change
        self._barrier = threading.Barrier(size)
        self._given = [None] * size
        self.exchanges = [
            ObjectExchange(lambda rank=rank: rank, lambda: size, self._bytes_of(rank))
            for rank in range(size)
        ]

    def run(self, fn):
        results = [None] * self.size

        def work(rank):
            try:
                results[rank] = fn(rank, self.exchanges[rank])
            except ConnectionError as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _all(self, rank, value):
        self._given[rank] = value
        self._barrier.wait()
        gathered = list(self._given)
        self._barrier.wait()
        return gathered

    def _bytes_of(self, rank):
        def gather(document, name):
            parts = [bytes(part) for part in self._all(rank, document)]
            changed = [self._change(name, other, part) for other, part in enumerate(parts)]
            return np.frombuffer(b"".join(changed), np.uint8)

        return gather


def test_gather_returns_the_objects_in_the_order_of_ranks():
    values = [{"loss": 1.5}, None, [np.arange(3), "größe" * 1000]]
    results = Ranks(3).run(lambda rank, exchange: exchange.gather(values[rank], "values"))
    for gathered in results:
        assert gathered[:2] == values[:2]
        np.testing.assert_array_equal(gathered[2][0], np.arange(3))
        assert gathered[2][1] == "größe" * 1000


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_returns_the_roots_object(root):
    results = Ranks(2).run(
        lambda rank, exchange: [
            exchange.broadcast({"of": rank, "n": n}, "value", root) for n in range(3)
        ]
    )
    assert results == [[{"of": root, "n": n} for n in range(3)]] * 2


class Evil:
    ran = False

    def __reduce__(self):
        return setattr, (Evil, "ran", True)


def evil_document(length, key=b""):
    """Return bytes of a given length that start with an authentication code of the rest."""
    document = cloudpickle.dumps(Evil()).ljust(length - LENGTH_BYTES - TAG_BYTES, b"\0")
    size = len(document).to_bytes(LENGTH_BYTES, "little")
    return size + hmac.new(key, b"values 0 1 " + document, "sha256").digest() + document


@pytest.mark.parametrize(
    "change",
    [
        lambda document: evil_document(len(document)),
        lambda document: evil_document(len(document), b"guess"),
        lambda document: document[:SEAL_BYTES] + evil_document(len(document))[SEAL_BYTES:],
        lambda document: bytes(LENGTH_BYTES) + document[LENGTH_BYTES:],
        lambda document: b"",
        lambda document: document[: LENGTH_BYTES + 3],
        lambda document: document[:-1] + bytes([document[-1] ^ 1]),
    ],
    ids=[
        "no key",
        "another key",
        "another object",
        "another length",
        "nothing",
        "cut",
        "a changed byte",
    ],
)
def test_unauthenticated_objects_are_not_unpickled(change):
    ranks = Ranks(2, lambda name, rank, part: change(part) if rank == 1 else part)

    results = ranks.run(lambda rank, exchange: exchange.gather("x" * 1000, "values"))

    assert not Evil.ran
    for error in results:
        assert isinstance(error, ConnectionError)
        assert "message of rank 1 is not authenticated by this job's key" in str(error)


def test_the_evil_object_runs_if_authenticated(key):
    """With the key the object is unpickled, so the other tests reject only the missing key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evil, "ran", False)
        ranks = Ranks(
            2, lambda name, rank, part: evil_document(len(part), key) if rank == 1 else part
        )
        ranks.run(lambda rank, exchange: exchange.gather("x" * 1000, "values"))
        assert Evil.ran


@pytest.mark.parametrize("as_of", ["another time", "another rank", "another exchange"])
def test_replayed_messages_are_rejected(as_of):
    kept = {}
    ranks = Ranks(2)

    def replayed(name, rank, document):
        return kept.setdefault(0 if as_of == "another rank" else rank, document)

    ranks._change = replayed
    names = ["values", "others" if as_of == "another exchange" else "values"]
    results = ranks.run(lambda rank, exchange: [exchange.gather("said", name) for name in names])

    assert all(isinstance(error, ConnectionError) for error in results), results


def test_objects_are_exchanged_without_a_key(monkeypatch):
    monkeypatch.delenv(RANKS_KEY_VARIABLE)
    assert Ranks(2).run(lambda rank, exchange: exchange.gather(rank, "n")) == [[0, 1], [0, 1]]
