"""The rendezvous as a store of torch.distributed, over real connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hvd_estimators.launch.rendezvous.channel import new_secret
from hvd_estimators.launch.rendezvous.client import (
    LocalRendezvousClient,
    RankClient,
    RemoteRendezvousClient,
)
from hvd_estimators.launch.rendezvous.gloo_http import GlooProxy
from hvd_estimators.launch.rendezvous.server import RendezvousServer
from hvd_estimators.torch.rendezvous_store import RendezvousStore

pytestmark = pytest.mark.timeout(60)

RANKS = 3


@contextlib.contextmanager
def stores_of_ranks() -> Iterator[list[RendezvousStore]]:
    """Yield one store per rank; the first rank runs the server."""
    secret = new_secret()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(secret, ["127.0.0.1"]))
        server.store.expect([f"host-{rank}" for rank in range(RANKS)])
        server.listen("127.0.0.1")
        clients = [LocalRendezvousClient(server.store, 0)]
        for rank in range(1, RANKS):
            client = RemoteRendezvousClient(server.endpoints[0], secret, rank, "host-0")
            clients.append(stack.enter_context(client))
        proxies = [stack.enter_context(GlooProxy(client, RANKS)) for client in clients]
        yield [RendezvousStore(client_of(proxy), seconds=20) for proxy in proxies]


def client_of(proxy: GlooProxy) -> RankClient:
    client = RankClient.from_environment(proxy.environment())
    assert client is not None
    return client


@pytest.fixture(scope="module")
def stores() -> Iterator[list[RendezvousStore]]:
    with stores_of_ranks() as stores:
        yield stores


def test_values_equal_those_of_torchs_hash_store(stores: list[RendezvousStore]) -> None:
    """The same calls, each from another rank, return the same values as torch's HashStore."""
    calls = [
        lambda store: store.set("a/b c?&%\n", b"\0\xff\r\n\r\n"),
        lambda store: store.get("a/b c?&%\n"),
        lambda store: store.set("a/b c?&%\n", "changed"),
        lambda store: store.get("a/b c?&%\n"),
        lambda store: store.check(["a/b c?&%\n"]),
        lambda store: store.check(["a/b c?&%\n", "missing"]),
        lambda store: store.add("n", 5),
        lambda store: store.add("n", -7),
        lambda store: store.get("n"),
        lambda store: store.set("empty", ""),
        lambda store: store.get("empty"),
        lambda store: store.delete_key("n"),
        lambda store: store.delete_key("n"),
        lambda store: store.check(["n"]),
    ]
    torchs = dist.HashStore()
    found = [call(stores[number % RANKS]) for number, call in enumerate(calls)]
    assert found == [call(torchs) for call in calls]


def test_ranks_wait_for_keys_of_other_ranks(stores: list[RendezvousStore]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stores[1].get, "late")
        both = pool.submit(stores[2].wait, ["late", "later"], timedelta(seconds=20))
        time.sleep(0.7)  # longer than the wait of one request
        assert not first.done()
        stores[0].set("late", b"1")
        assert first.result(5) == b"1"
        assert not both.done()
        stores[1].set("later", b"")
        both.result(5)
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.3 s, keys: late, never"):
        stores[2].wait(["late", "never"], timedelta(seconds=0.3))
    assert 0.3 <= time.monotonic() - started < 5


def test_torch_uses_the_store_through_prefixes(stores: list[RendezvousStore]) -> None:
    """Torch's C++ code calls the Python methods, some under other names."""
    one, two = (dist.PrefixStore("group", store) for store in stores[:2])
    one.set("key", b"value")
    assert two.get("key") == b"value"
    assert stores[2].get("group/key") == b"value"
    assert two.add("count", 2) == 2
    one.set("key", "new")
    assert one.check(["key", "count"])
    assert not one.check(["nothing"])
    assert not one.has_extended_api()
    assert two.get("key") == b"new"
    assert one.delete_key("key")
    with pytest.raises(dist.DistStoreError, match="timeout"):
        two.wait(["key"], timedelta(seconds=0.1))
