"""Messages from ranks to the driver's standard output."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator

import pytest

from hvd_estimators import log_to_driver
from hvd_estimators.launch.service import events
from hvd_estimators.launch.service.events import RankMessage, receive_events
from hvd_estimators.launch.service.server import SERVICE_VARIABLE, DriverService

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[object]]:
    """Make this process rank 3, and collect its messages."""
    found: queue.Queue[object] = queue.Queue()
    monkeypatch.setenv("HOROVOD_RANK", "3")
    events._forget()
    with DriverService("127.0.0.1") as service, receive_events(service, found.put):
        monkeypatch.setenv(SERVICE_VARIABLE, service.address)
        yield found
        if events._current is not None:
            events._current.close()
    events._forget()


def test_messages_arrive_in_order_as_text(received: queue.Queue[object]) -> None:
    for message in ("größe", 5, "two\nlines\n"):
        log_to_driver(message)

    got = [received.get(timeout=10) for _ in range(3)]
    assert got == [RankMessage(3, "größe"), RankMessage(3, "5"), RankMessage(3, "two\nlines")]


@pytest.mark.forks
def test_a_forked_child_opens_its_own_connection(received: queue.Queue[object]) -> None:
    log_to_driver("parent")
    assert received.get(timeout=10) == RankMessage(3, "parent")
    child = os.fork()
    if not child:
        log_to_driver("child")
        events._current.close()  # type: ignore[union-attr]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    log_to_driver("parent again")

    assert {received.get(timeout=10) for _ in range(2)} == {
        RankMessage(3, "child"),
        RankMessage(3, "parent again"),
    }


def test_messages_are_printed_if_no_driver_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVICE_VARIABLE, raising=False)
    events._forget()

    log_to_driver("hello")

    assert capsys.readouterr().out == "hello\n"
    events._forget()
