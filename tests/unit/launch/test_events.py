"""Events that ranks send to the driver."""

import contextlib
import json
import queue
import socket
import threading
import time

import psutil
import pytest

from hvd_estimators.launch.service.events import (
    EventSender,
    RankOutput,
    RankProgress,
    receive_events,
    serialized,
)
from hvd_estimators.launch.service.output_sinks import print_event
from hvd_estimators.launch.service.server import SERVICE_VARIABLE, DriverService

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def received():
    return queue.Queue()


@pytest.fixture
def target(received):
    """Receive events during a test; yield the address to send them to."""
    with DriverService("127.0.0.1") as service, receive_events(service, received.put):
        yield service.address


def step(number, rank=0):
    return RankProgress(rank, epoch=0, epochs=1, step=number, steps=9, rows_per_second=2.5)


def get(received, count):
    return [received.get(timeout=10) for _ in range(count)]


def test_events_arrive_in_order_with_their_values(received, target):
    sender = EventSender(target)
    sent = [
        RankProgress(0, 1, 2, i, 500, i / 7, {"loss": i / 3}, done=i == 499)
        if i % 2
        else RankOutput(i, f"größe {i}\n")
        for i in range(500)
    ]

    for event in sent:
        sender.send(event)
    sender.close()

    assert get(received, 500) == sent


@pytest.mark.parametrize(
    ("host", "listening"),
    [("127.0.0.2", "127.0.0.2"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("[::1]", "::1")],
)
def test_events_are_accepted_at_the_drivers_address_only(received, host, listening):
    with DriverService(host) as service, receive_events(service, received.put):
        _, port, _ = service.address.rsplit(":", 2)
        with contextlib.closing(EventSender(service.address)) as sender:
            sender.send(step(1))
        assert get(received, 1) == [step(1)]

        taken = [
            c.laddr.ip
            for c in psutil.Process().net_connections()
            if c.status == "LISTEN" and c.laddr.port == int(port)
        ]
        assert taken == [listening]


def test_a_rank_finds_the_driver_through_its_environment(received, target, monkeypatch):
    monkeypatch.setenv(SERVICE_VARIABLE, target)

    with contextlib.closing(EventSender()) as sender:
        sender.send(step(1, rank=1))

    assert get(received, 1) == [step(1, rank=1)]


def test_concurrent_events_are_handled_one_by_one():
    handled, inside, overlaps = queue.Queue(), threading.Lock(), []

    def handle(event):
        if not inside.acquire(blocking=False):
            overlaps.append(event)
            return
        time.sleep(0.001)
        inside.release()
        handled.put((event.rank, event.step))

    with DriverService("127.0.0.1") as service, receive_events(service, handle):
        senders = [EventSender(service.address) for _ in range(4)]
        for number in range(20):
            for rank, sender in enumerate(senders):
                sender.send(step(number, rank))
        got = get(handled, 80)
        for sender in senders:
            sender.close()

    assert not overlaps
    for rank in range(4):
        assert [number for sender, number in got if sender == rank] == list(range(20))


@pytest.mark.parametrize("secret", ["wrong", "", "0" * 32, "0" * 64])
def test_events_with_another_secret_are_rejected(received, target, secret):
    host, port, right = target.rsplit(":", 2)

    with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(f"{secret}\n".encode() + json.dumps({"evil": True}).encode() + b"\n")
        stranger.sendall(b"\0" * 64)
        stranger.settimeout(10)
        heard = stranger.recv(1000)
        assert len(heard) == 32  # a challenge that the stranger cannot answer
        assert right.encode() not in heard
        assert stranger.recv(1) == b""  # the connection was closed
    with contextlib.closing(EventSender(f"{host}:{port}:{secret}")) as sender:
        sender.send(RankOutput(0, "evil"))
    with contextlib.closing(EventSender(target)) as sender:
        sender.send(RankOutput(0, "good"))

    assert get(received, 1) == [RankOutput(0, "good")]
    assert received.empty()


def test_an_event_that_cannot_be_handled_does_not_stop_the_others(caplog):
    handled = queue.Queue()

    def handle(event):
        handled.put(1 / event.step)

    with DriverService("127.0.0.1") as service, receive_events(service, handle):
        with contextlib.closing(EventSender(service.address)) as sender:
            sender.send(step(0))
            sender.send(step(2))
        assert get(handled, 1) == [0.5]

    assert "could not be handled" in caplog.text


def test_sending_without_a_target_does_nothing(monkeypatch):
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)

    sender = EventSender()
    sender.send(step(1))
    sender.close()


def test_sending_without_a_listener_does_not_wait():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()

    sender = EventSender(f"127.0.0.1:{port}:secret")
    sender.send(step(1))
    sender.close()

    assert time.monotonic() - started < 4


def test_a_stopped_driver_does_not_disturb_the_rank():
    with DriverService("127.0.0.1") as service, receive_events(service, lambda event: None):
        sender = EventSender(service.address)

    for rank in range(1000):
        sender.send(RankOutput(rank, "x" * 1000))
    sender.close()


def test_all_events_are_handled_before_the_block_ends():
    handled = []

    def handle(event):
        time.sleep(0.01)
        handled.append(event.step)

    with DriverService("127.0.0.1") as service, receive_events(service, handle):
        sender = EventSender(service.address)
        for number in range(30):
            sender.send(step(number))
        sender.close()

    assert handled == list(range(30))


def test_a_connected_rank_does_not_delay_the_driver():
    with DriverService("127.0.0.1") as service, receive_events(service, lambda event: None):
        sender = EventSender(service.address)
        sender.send(step(1))
        started = time.monotonic()

    assert time.monotonic() - started < 5
    sender.close()


def test_only_output_lines_are_printed_with_their_rank_from_any_thread(capsys):
    handler = serialized(print_event)
    threads = [threading.Thread(target=handler, args=(RankOutput(r, "hello\n"),)) for r in (0, 1)]
    for thread in threads:
        thread.start()
        thread.join()
    handler(step(1))

    assert capsys.readouterr().err == "[0] hello\n[1] hello\n"


def test_unknown_events_are_logged_and_do_not_stop_the_others(received, target, caplog):
    """As from ranks that have another version of this package."""
    with contextlib.closing(EventSender(target)) as sender:
        sender._channel.send({"kind": "weather", "degrees": 30})
        sender._channel.send({"kind": "output", "rank": 0})
        sender.send(step(1))

    assert get(received, 1) == [step(1)]
    assert caplog.text.count("could not be handled") == 2
