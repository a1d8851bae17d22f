"""Messages of authenticated peers that this version does not send, such as those of another one."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from json_values import JSON_VALUES, NO_JSON, Effort, edited_anywhere, efforts, fuzz

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel, MessageError, new_secret
from hvd_estimators.launch.rendezvous.client import (
    LocalRendezvousClient,
    RankClient,
    RemoteRendezvousClient,
)
from hvd_estimators.launch.rendezvous.gloo_http import GlooKeys, GlooProxy
from hvd_estimators.launch.rendezvous.server import JobStore, RendezvousServer
from hvd_estimators.launch.service.events import (
    EventSender,
    RankMessage,
    RankStage,
    receive_events,
)
from hvd_estimators.launch.service.exchange import ExchangeServer, exchange
from hvd_estimators.launch.service.launch_watch import LaunchWatch
from hvd_estimators.launch.service.server import DriverService, connect_to_driver
from hvd_estimators.launch.stage import Stage
from hvd_estimators.launch.timeouts import Patience

pytestmark = pytest.mark.timeout(120)

SECRET = new_secret()
PATIENCE = Patience(attempt=0.5, refused=0.5, silence=1.0, pause=0.02, beat=0.05)

PLACE = {"rank": 1, "scope": "global_", "key": "1"}
MESSAGES = [
    {"kind": "put", **PLACE},
    {"kind": "set", **PLACE},
    {"kind": "get", **PLACE},
    {"kind": "get_all", "rank": 1, "scope": "global_", "keys": ["0", "1"]},
    {"kind": "get_parts", **PLACE, "count": 2},
    {"kind": "add", **PLACE, "amount": 1},
    {"kind": "append", **PLACE},
    {"kind": "compare_set", **PLACE, "expected": "a"},
    {"kind": "wait", "rank": 1, "scope": "global_", "keys": ["1"], "seconds": 0.1},
    {"kind": "count", "rank": 1, "scope": "global_"},
    {"kind": "delete", **PLACE},
    {"kind": "alive", "rank": 1},
    {"kind": "failed", "rank": 1, "host": "host-1", "why": "had failed"},
    {"kind": "done", "rank": 1},
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "RENDEZVOUS_KEY", 0.001)
    monkeypatch.setattr(timeouts, "EXCHANGE", 0.2)


@pytest.mark.parametrize("effort", efforts(300))
def test_the_rendezvous_answers_or_rejects_any_message(effort: Effort) -> None:
    def check(message: dict[str, Any]) -> None:
        store = JobStore(60)
        store.expect(["host-0", "host-1"])
        with contextlib.suppress(MessageError):
            answer, body = store.handle(message, b"12")
            assert answer["status"] in (200, 404, 409)
            assert isinstance(body, bytes)
        # It still serves other ranks.
        assert store.handle({"kind": "set", "rank": 0, "scope": "s", "key": "k"}, b"v")[0] == {
            "status": 200
        }
        assert store.handle({"kind": "get", "rank": 0, "scope": "s", "key": "k"})[1] == b"v"

    edited = st.sampled_from(MESSAGES).flatmap(edited_anywhere)
    fuzz(check, edited.filter(lambda message: isinstance(message, dict)), effort)


@pytest.mark.parametrize("text", [*(text for text in NO_JSON if text != b"{}"), b"5", b"[]"])
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
        with accepted as channel, pytest.raises(MessageError) as raised:
            channel.receive(5)
        thread.join()
    assert f"127.0.0.1:{sent[0]} sent a message" in str(raised.value)


def test_a_rank_learns_at_once_that_rank_0_does_not_know_its_message() -> None:
    with RendezvousServer(SECRET, ["127.0.0.1"], PATIENCE) as server:
        server.store.expect(["host-0", "host-1"])
        server.listen("127.0.0.1")
        client = RemoteRendezvousClient(server.endpoints[0], SECRET, 1, "host-0", PATIENCE)
        with client:
            with pytest.raises(MessageError, match=r"host-0 rejects a message: rank 1 .*'later'"):
                client.request("later")
            with GlooProxy(client, 2) as proxy:
                rank = RankClient.from_environment(proxy.environment())
                assert rank is not None
                with pytest.raises(MessageError, match="host-0 rejects a message: rank 1"):
                    rank.request("add", key="k", amount="much")
                assert rank.request("add", key="k", amount=2)[1] == b"2"
            assert client.failure() is None


@pytest.mark.parametrize("content", [b"", b"5\n", b"[" * 5000, b'{"kind": "get"}\n', b"\xff\n"])
def test_the_proxy_rejects_requests_of_a_rank_without_values(content: bytes) -> None:
    with GlooProxy(LocalRendezvousClient(JobStore(60), 0), 2) as proxy:
        env = proxy.environment()
        rank = RankClient.from_environment(env)
        assert rank is not None
        connection = http.client.HTTPConnection(*rank._endpoint, timeout=10)
        connection.request("POST", "/keys/count", content, rank._headers)
        assert connection.getresponse().status == 400
        connection.close()
        assert rank.request("count")[0]["count"] == 0


def test_heartbeats_with_an_unknown_failure_end_the_job_with_the_reason() -> None:
    with RendezvousServer(SECRET, ["127.0.0.1"], PATIENCE) as server:
        server.listen("127.0.0.1")
        answer: Any = ({"status": 200, "failure": {"reason": "unknown"}}, b"")
        server.store.handle = lambda message, body=b"": answer  # type: ignore[method-assign]
        with RemoteRendezvousClient(server.endpoints[0], SECRET, 1, "host-0", PATIENCE) as client:
            client._heartbeat.join(10)
            assert "Rank 0 on host-0 sent a message" in str(client.failure())


def test_addresses_that_are_cut_are_not_passed_to_gloo() -> None:
    class Client(LocalRendezvousClient):
        def request(self, kind: str, body: bytes = b"", **values: Any) -> Any:
            return {"status": 200}, b"" if kind == "put" else b"short"

    keys = GlooKeys(Client(JobStore(60), 0), 3)
    assert keys.request("PUT", "global_", "0", b"a" * 16)[0] == 200
    with pytest.raises(MessageError, match="5 bytes for 2 addresses of 8 bytes"):
        keys.request("GET", "global_", "1", b"")


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
    server = ExchangeServer(1, "app", stages.append)
    with server, receive_events(service, print, {"exchange": server.answer}):
        for task, body in ((1, b"{}"), (-1, b"{}"), (0, b"{"), ("none", b"{}")):
            send({"kind": "exchange", "task": task, "host": "here"}, body)
        send({"kind": "exchange"}, b"{}")
        fuzz(lambda task: send({"kind": "exchange", "task": task}, b"{}"), JSON_VALUES, effort)
        assert not server._messages
        assert not stages
        assert gather(service, 0) == [{"of": 0}]
    assert stages == [RankStage(-1, 0, socket.gethostname(), Stage.STARTED)]


@pytest.mark.parametrize(
    "answer",
    [
        ({}, b""),
        ({"complete": True}, b"text"),
        ({"complete": True}, zlib.compress(b"[1]")[:-2]),
        ({"complete": True}, zlib.compress(b"[")),
    ],
)
def test_an_answer_that_is_none_names_the_driver(
    service: DriverService, answer: tuple[dict[str, Any], bytes]
) -> None:
    def reply(channel: Channel, *_: Any) -> None:
        channel.send(*answer)

    with (
        receive_events(service, print, {"exchange": reply}),
        pytest.raises(UnreachableError, match="The driver sent a message that this version"),
    ):
        gather(service, 0)


def test_a_stage_of_another_version_does_not_end_the_watch() -> None:
    passed: list[Any] = []
    with LaunchWatch(1, "host") as watch:
        handle = watch.handler(passed.append)
        for stage in (99, -1, "late", None):
            with pytest.raises(ValueError, match="is not a valid Stage"):
                handle(RankStage(0, 0, "host", stage))  # type: ignore[arg-type]
        handle(RankStage(0, 0, "host", Stage.FUNCTION))
        handle(RankMessage(0, "text"))
    assert passed == [RankMessage(0, "text")]


def test_json_text_of_a_large_exchange_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvd_estimators.launch.service import exchange as module

    monkeypatch.setattr(module, "_MAX_BYTES", 2**16)
    unpack: Callable[[bytes], Any] = module.unpacked
    assert unpack(zlib.compress(json.dumps(["a" * 1000]).encode())) == ["a" * 1000]
    with pytest.raises(ValueError, match="more than 65536 bytes"):
        unpack(zlib.compress(json.dumps(["a" * 2**20]).encode()))
