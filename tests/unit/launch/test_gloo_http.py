"""The loopback HTTP proxy for a rank's Horovod; requests need a token."""

import contextlib
import copy
import http.client
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvd_estimators.launch.rendezvous.client import (
    TOKEN_VARIABLE,
    LocalRendezvousClient,
    PeerLostError,
)
from hvd_estimators.launch.rendezvous.gloo_http import GlooProxy
from hvd_estimators.launch.rendezvous.server import Failure, JobStore

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def store():
    store = JobStore()
    store.expect(["host", "host"])
    return store


@pytest.fixture
def proxy(store):
    with GlooProxy(LocalRendezvousClient(store, 0), size=2) as proxy:
        yield proxy


def ask(proxy, method, path, body=b"", headers=None):
    env = proxy.environment()
    if headers is None:
        headers = {"Authorization": f"Bearer {env[TOKEN_VARIABLE]}"}
    port = int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()


def test_keys_are_written_read_and_deleted_as_horovod_does(proxy):
    value = bytes(range(256)) * 100
    assert ask(proxy, "GET", "/global/0") == (404, b"")
    assert ask(proxy, "PUT", "/global/0", value) == (200, b"")
    assert ask(proxy, "GET", "/global/0") == (200, value)
    assert ask(proxy, "GET", "/local_host/0") == (404, b"")
    assert ask(proxy, "DELETE", "/global/0") == (200, b"")
    assert ask(proxy, "GET", "/global/0") == (404, b"")


def address(scope, rank, other):
    """Return the bytes at which a rank expects another one: always 24, and different for each."""
    return f"{scope[-8:]:>12}:{rank:5}>{other:5}".encode()


class CountingClient(LocalRendezvousClient):
    """Client that records its requests and the bytes of their answers."""

    def __init__(self, store, rank):
        super().__init__(store, rank)
        self.kinds = []
        self.bytes_received = 0

    def request(self, kind, body=b"", **values):
        answer, reply = super().request(kind, body, **values)
        if answer["status"] != 404:  # a repeated wait
            self.kinds.append(kind)
            self.bytes_received += len(reply)
        return answer, reply


def connect_like_gloo(proxy, scope, rank, size, barrier):
    """Send the requests of Gloo's `connectFullMesh`; return the addresses of the other ranks.

    The sequence is that of ``gloo/rendezvous/context.cc`` and ``http_store.cc`` in Horovod 0.28.
    """
    others = [other for other in range(size) if other != rank]
    assert ask(proxy, "PUT", f"/{scope}/rank_{rank}", b"host")[0] == 200
    for other in range(rank):
        ask(proxy, "GET", f"/{scope}/rank_{other}")
    own = b"".join(address(scope, rank, other) for other in others)
    assert ask(proxy, "PUT", f"/{scope}/{rank}", own) == (200, b"")
    addresses = {}
    for other in others:
        while ask(proxy, "GET", f"/{scope}/{other}")[0] == 404:
            pass
        status, value = ask(proxy, "GET", f"/{scope}/{other}")
        assert status == 200
        num_bytes = len(value) // (size - 1)
        place = rank - 1 if rank > other else rank
        addresses[other] = value[place * num_bytes : (place + 1) * num_bytes]
    barrier.wait(30)
    assert ask(proxy, "DELETE", f"/{scope}/{rank}")[0] == 200
    return addresses


def test_ranks_find_each_other_with_three_messages_per_scope():
    """Each rank gets the addresses that the others put for it: in all scopes, and once more."""
    scopes = {  # the ranks that each scope connects; Horovod's numbers within it are consecutive
        "global_": [0, 1, 2, 3, 4],
        "local_a": [0, 1, 2],
        "local_b": [3, 4],
        "cross_0": [0, 3],
        "global__process_set_hash_7": [1, 2, 4],
        "global__process_set_hash_8": [0, 1, 2, 3, 4],
    }
    store = JobStore()
    store.expect(["host"] * 5)
    clients = [CountingClient(store, rank) for rank in range(5)]
    barriers = {scope: threading.Barrier(len(ranks)) for scope, ranks in scopes.items()}

    def connect(rank):
        with GlooProxy(clients[rank], size=5) as proxy:
            for scope, ranks in [*scopes.items()] * 2:
                if rank not in ranks:
                    continue
                own = ranks.index(rank)
                found = connect_like_gloo(proxy, scope, own, len(ranks), barriers[scope])
                others = [n for n in range(len(ranks)) if n != own]
                assert found == {other: address(scope, other, own) for other in others}
                barriers[scope].wait(30)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(connect, range(5)))
    for rank, client in enumerate(clients):
        of_rank = [ranks for ranks in scopes.values() if rank in ranks] * 2
        assert client.kinds == ["set", "get_parts", "delete"] * len(of_rank)
        assert client.bytes_received == sum(24 * (len(ranks) - 1) for ranks in of_rank)


def test_values_that_are_not_one_address_per_rank_arrive_whole():
    store = JobStore()
    store.expect(["host"] * 3)
    clients = [CountingClient(store, rank) for rank in range(2)]
    with GlooProxy(clients[0], size=3) as one, GlooProxy(clients[1], size=3) as two:
        # Ten bytes for each of two other ranks, and then eleven bytes.
        for scope, value in (("global_", b"0123456789" * 2), ("local_a", b"0123456789a")):
            for rank, proxy in enumerate((one, two)):
                ask(proxy, "PUT", f"/{scope}/{rank}", value)
        assert ask(two, "GET", "/local_a/0") == (200, b"0123456789a")
    assert clients[1].kinds == ["set", "set", "get"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer " + "0" * 64},
        {"Authorization": "Bearer größe".encode()},
        {"X-Token": "none"},
    ],
    ids=str,
)
def test_requests_without_the_token_neither_read_nor_write(proxy, store, headers):
    ask(proxy, "PUT", "/global/0", b"address")
    before = copy.deepcopy(store._scopes)
    for method, path in (
        ("GET", "/global/0"),
        ("PUT", "/global/1"),
        ("DELETE", "/global/0"),
        ("GET", "/"),
    ):
        assert ask(proxy, method, path, headers=headers) == (401, b"")
    assert store._scopes == before


def test_each_rank_has_its_own_token(store):
    with (
        GlooProxy(LocalRendezvousClient(store, 0), size=2) as one,
        GlooProxy(LocalRendezvousClient(store, 1), size=2) as two,
    ):
        header = {"Authorization": f"Bearer {one.environment()[TOKEN_VARIABLE]}"}
        assert ask(one, "PUT", "/global/0", b"v", header) == (200, b"")
        assert ask(two, "GET", "/global/0", b"", header) == (401, b"")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/global/0", 400),
        ("GET", "/global", 400),
        ("PUT", "/a/b/c", 400),
        ("GET", "/", 400),
        ("GET", "/keys/0", 400),
    ],
)
def test_unknown_requests_are_rejected(proxy, method, path, expected):
    assert ask(proxy, method, path)[0] == expected


def test_a_body_of_gigabytes_is_rejected_at_once(proxy):
    env = proxy.environment()
    headers = {"Authorization": f"Bearer {env[TOKEN_VARIABLE]}", "Content-Length": "4294967296"}
    status, body = ask(proxy, "PUT", "/global/0", b"", headers)
    assert (status, body) == (400, b"a value has 4294967296 bytes; at most 16777216 fit")


def test_an_endless_header_is_cut_off(proxy):
    port = int(proxy.environment()["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with socket.create_connection(("127.0.0.1", port)) as endless:
        endless.settimeout(10)
        head = b"x" * 10_000_000
        with pytest.raises(ConnectionError):
            endless.sendall(head)


def test_the_proxy_listens_on_loopback_only(proxy):
    port = int(proxy.environment()["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_a_lost_link_is_reported_as_503():
    class Lost(LocalRendezvousClient):
        def request(self, *args, **values):
            raise PeerLostError(Failure(0, "host", "has not answered", lost=True))

    with GlooProxy(Lost(JobStore(), 0), size=2) as proxy:
        assert ask(proxy, "GET", "/global/0") == (503, b"")
