"""Events that ranks send to the driver."""

import contextlib
import functools
import queue
import threading
import time

import psutil
import pytest

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.service.events import (
    EventSender,
    RankOutput,
    RankProgress,
    receive_events,
)
from hvd_estimators.launch.service.server import DriverService

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


def test_limits_fit_into_the_milliseconds_of_every_system():
    limits = [value for name, value in vars(timeouts).items() if isinstance(value, float)]
    assert timeouts.EVENT_IDLE in limits
    assert max(limits) * 1000 < 2**31


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


def test_ranks_are_asked_to_stop_once_also_if_they_train_later():
    asked = queue.Queue()
    with (
        DriverService("127.0.0.1") as service,
        receive_events(service, lambda event: None) as ask_to_stop,
        contextlib.closing(EventSender(service.address)) as early,
        contextlib.closing(EventSender(service.address)) as late,
    ):
        for name, sender in (("early", early), ("late", late)):
            sender.when_asked_to_stop(functools.partial(asked.put, name))
        early.ask_to_wait(15.0)
        # A notice during the launch: it reaches the first rank as soon as it trains.
        ask_to_stop()
        assert asked.get(timeout=10) == "early"
        assert asked.empty()
        late.ask_to_wait(15.0)
        assert asked.get(timeout=10) == "late"
        for sender in (early, late):
            with pytest.raises(TimeoutError):
                sender._channel.receive(0.1)


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


def test_unknown_events_are_logged_and_do_not_stop_the_others(received, target, caplog):
    """As from ranks that have another version of this package."""
    with contextlib.closing(EventSender(target)) as sender:
        sender._channel.send({"kind": "weather", "degrees": 30})
        sender._channel.send({"kind": "output", "rank": 0})
        sender.send(step(1))

    assert get(received, 1) == [step(1)]
    assert caplog.text.count("could not be handled") == 2
