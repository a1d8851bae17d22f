"""Messages of authenticated peers that this version does not send, such as those of another one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from json_values import JSON_VALUES, Effort, efforts, fuzz
from processes import wait_until

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel, new_secret
from hvd_estimators.launch.rendezvous.client import (
    LocalRendezvousClient,
    PeerLostError,
    RankClient,
    RemoteRendezvousClient,
)
from hvd_estimators.launch.rendezvous.gloo_http import GlooProxy
from hvd_estimators.launch.rendezvous.server import JobStore, RendezvousServer
from hvd_estimators.launch.service.events import EventSender, RankMessage, RankStage, receive_events
from hvd_estimators.launch.service.exchange import ExchangeServer, exchange
from hvd_estimators.launch.service.launch_watch import LaunchWatch
from hvd_estimators.launch.service.server import DriverService, connect_to_driver
from hvd_estimators.launch.stage import Stage
from hvd_estimators.launch.timeouts import Patience

pytestmark = pytest.mark.timeout(120)

SECRET = new_secret()
PATIENCE = Patience(attempt=0.5, refused=0.5, silence=1.0, pause=0.02, beat=0.05)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RENDEZVOUS_KEY", 0.001)
    monkeypatch.setattr(timeouts, "EXCHANGE", 0.2)


@pytest.mark.parametrize("text", [b"", b"null", b"\xff\xfe", b"5"])
def test_a_message_that_is_not_an_object_is_rejected_with_the_peers_address(text: bytes) -> None:
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send() -> None:
            with Channel.open(listening.getsockname(), SECRET, 5) as channel:
                sent.append(channel._connection.getsockname()[1])
                length = len(text + b"\n").to_bytes(4, "big")
                tag = channel._tag("send", length, text + b"\n")
                channel._connection.sendall(length + text + b"\n" + tag)

        thread = threading.Thread(target=send)
        thread.start()
        connection, _ = listening.accept()
        accepted = Channel.accept(connection, SECRET, 5)
        with accepted as channel, pytest.raises(ConnectionError) as raised:
            channel.receive(5)
        thread.join()
    assert f"127.0.0.1:{sent[0]} sent no message" in str(raised.value)


def test_a_message_that_rank_0_does_not_know_ends_the_launch() -> None:
    with RendezvousServer(SECRET, ["127.0.0.1"], PATIENCE) as server:
        server.store.expect(["host-0", "host-1"])
        server.listen("127.0.0.1")
        client = RemoteRendezvousClient(server.endpoints[0], SECRET, 1, "host-0", PATIENCE)
        with client:
            with pytest.raises(PeerLostError, match="host-0 has closed its connection"):
                client.request("later")
            wait_until(client.failure, 10)
        # It still serves other ranks.
        with RemoteRendezvousClient(server.endpoints[0], SECRET, 0, "host-0", PATIENCE) as other:
            assert other.request("delete", scope="s", key="k")[0]["existed"] is False


@pytest.mark.parametrize(
    ("kind", "values"), [("get", {}), ("alive", {}), ("set", {"key": "k", "scope": "s", "more": 1})]
)
def test_the_proxy_rejects_requests_of_a_rank_that_it_does_not_know(
    kind: str, values: dict[str, Any]
) -> None:
    store = JobStore()
    with GlooProxy(LocalRendezvousClient(store, 0), 2) as proxy:
        env = proxy.environment()
        rank, other = RankClient.from_environment(env), RankClient.from_environment(env)
        assert rank is not None
        assert other is not None
        with pytest.raises(ConnectionError, match="does not answer"):
            rank.request(kind, **values)
        # A rank cannot reach the keys of Horovod's Gloo.
        other.request("set", b"1", key="k", scope="global_")
        assert store._scopes == {"keys": {"k": b"1"}}


@pytest.fixture
def service() -> Iterator[DriverService]:
    with DriverService("127.0.0.1") as service:
        yield service


def gather(service: DriverService, task: int) -> Any:
    def without_spark(text: str) -> list[str]:
        raise AssertionError("the driver is reachable")

    context: Any = SimpleNamespace(partitionId=lambda: task, allGather=without_spark)
    with contextlib.closing(EventSender(service.address)) as driver:
        return exchange(context, driver, {"of": task})


@pytest.mark.parametrize("effort", efforts(30))
def test_the_exchange_ignores_messages_of_no_task(service: DriverService, effort: Effort) -> None:
    def send(message: Any, body: bytes) -> None:
        with connect_to_driver(service.address) as channel:
            channel.send({"kind": "events"})
            channel.send(message, body)
            with pytest.raises(ConnectionError):
                channel.receive(5)

    stages: list[RankStage] = []
    server = ExchangeServer(1, stages.append)
    with server, receive_events(service, print, {"exchange": server.answer}):
        for task, body in ((1, b"{}"), (-1, b"{}"), (0, b"{"), ("none", b"{}")):
            send({"kind": "exchange", "task": task, "host": "here"}, body)
        send({"kind": "exchange"}, b"{}")
        fuzz(lambda task: send({"kind": "exchange", "task": task}, b"{}"), JSON_VALUES, effort)
        assert not server._messages
        assert not stages
        assert gather(service, 0) == [{"of": 0}]
    assert stages == [RankStage(-1, 0, socket.gethostname(), Stage.STARTED)]


def test_a_stage_of_another_version_does_not_end_the_watch() -> None:
    passed: list[Any] = []
    with LaunchWatch(1) as watch:
        handle = watch.handler(passed.append)
        for stage in (99, -1, "late", None):
            with pytest.raises(ValueError, match="is not a valid Stage"):
                handle(RankStage(0, 0, "host", stage))  # type: ignore[arg-type]
        handle(RankStage(0, 0, "host", Stage.FUNCTION))
        handle(RankMessage(0, "text"))
    assert passed == [RankMessage(0, "text")]
