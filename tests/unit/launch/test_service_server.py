"""The driver's service: one port and one secret for all messages from ranks."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hvd_estimators.launch.rendezvous.channel import AuthenticationError, new_secret
from hvd_estimators.launch.service.elastic_state import CommitStore, commit, fetch
from hvd_estimators.launch.service.events import EventSender, RankMessage, receive_events
from hvd_estimators.launch.service.exchange import ExchangeServer, exchange
from hvd_estimators.launch.service.server import DriverService, connect_to_driver

pytestmark = pytest.mark.timeout(60)


def test_events_exchanges_and_commits_share_a_port_and_a_secret() -> None:
    received: queue.Queue[Any] = queue.Queue()
    before = len(listening_ports())
    server = ExchangeServer(1, lambda stage: None)
    commits = CommitStore()
    with (
        DriverService("127.0.0.1") as service,
        commits.serve(service),
        receive_events(service, received.put, {"exchange": server.answer}),
        server,
    ):
        assert len(listening_ports()) == before + 1
        context: Any = SimpleNamespace(partitionId=lambda: 0)
        with contextlib.closing(EventSender(service.address)) as sender:
            sender.send(RankMessage(0, "before"))
            assert exchange(context, sender, {"rank": 0}) == [{"rank": 0}]
            commit(service.address, 0, "state")
            assert fetch(service.address, 0) is None
            sender.send(RankMessage(0, "after"))
        assert [received.get(timeout=10).message for _ in range(2)] == ["before", "after"]
    assert commits.count == 1


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections()
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_ranks_reach_a_driver_by_a_name_of_either_family(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *given, **named: resolve(
            address if host == "driver.example" else host, *given, **named
        ),
    )
    with DriverService("driver.example") as service:
        assert service.address.startswith("driver.example:")
        service.add_handler("echo", lambda channel, message, body: channel.send(message, body))
        with connect_to_driver(service.address) as channel:
            channel.send({"kind": "echo"}, b"body")
            assert channel.receive(5) == ({"kind": "echo"}, b"body")
        assert service.drain(5)


def test_an_unknown_request_ends_only_its_own_connection(caplog: pytest.LogCaptureFixture) -> None:
    with DriverService("127.0.0.1") as service:
        service.add_handler("echo", lambda channel, message, body: channel.send(message, body))
        with connect_to_driver(service.address) as channel:
            channel.send({"kind": "weather"})
            with pytest.raises(ConnectionError):
                channel.receive(5)
        with connect_to_driver(service.address) as channel:
            channel.send({"kind": "echo"}, b"body")
            assert channel.receive(5) == ({"kind": "echo"}, b"body")
    assert "could not be answered" in caplog.text


def test_the_secret_of_another_launch_is_rejected() -> None:
    with DriverService("127.0.0.1") as service, DriverService("127.0.0.1") as other:
        place = service.address.rpartition(":")[0]
        for secret in (other.address.rpartition(":")[2], new_secret().hex(), ""):
            with pytest.raises((AuthenticationError, ConnectionError)):
                connect_to_driver(f"{place}:{secret}")


def test_connections_and_threads_end_with_the_service() -> None:
    threads = threading.active_count()
    with DriverService("127.0.0.1") as service:
        service.add_handler("wait", lambda channel, *_: channel.receive(60))
        channel = connect_to_driver(service.address)
        channel.send({"kind": "wait"})
        assert not service.drain(0.05)
    with pytest.raises(ConnectionError):
        channel.receive(5)
    channel.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)
