"""All-gathers between tasks, over the driver if all tasks reach it and over Spark otherwise."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.client import PeerLostError
from hvd_estimators.launch.service.events import EventSender, receive_events
from hvd_estimators.launch.service.exchange import ExchangeServer, exchange
from hvd_estimators.launch.service.server import DriverService

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "EVENT_CONNECT", 0.5)
    monkeypatch.setattr(timeouts, "EXCHANGE", 1.0)


@contextlib.contextmanager
def served(tasks: int = 3) -> Iterator[str]:
    """Serve the exchange; yield the service's address."""
    server = ExchangeServer(tasks, lambda stage: None)
    with (
        DriverService("127.0.0.1") as service,
        receive_events(service, print, {"exchange": server.answer}),
        server,
    ):
        yield service.address


class Tasks:
    """Tasks in threads that count the all-gathers over Spark."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.gathered = 0
        self._texts = [""] * number
        self._all_told = threading.Barrier(number)

    def context(self, task: int) -> Any:
        def gather(text: str) -> list[str]:
            self._texts[task] = text
            if self._all_told.wait(20) == 0:
                self.gathered += 1
            found = list(self._texts)
            self._all_told.wait(20)
            return found

        return SimpleNamespace(partitionId=lambda: task, allGather=gather)

    def run(self, work: Callable[[int, Any, EventSender], Any], addresses: list[str]) -> list[Any]:
        def task(number: int) -> Any:
            with contextlib.closing(EventSender(addresses[number])) as driver:
                return work(number, self.context(number), driver)

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(task, range(self.number)))


def once(number: int, context: Any, driver: EventSender) -> Any:
    return exchange(context, driver, {"of": number, "größe": number})


EXPECTED = [[{"of": n, "größe": n} for n in range(3)]] * 3


def test_all_tasks_gather_all_messages_in_task_order() -> None:
    tasks = Tasks(3)
    with served() as address:
        assert tasks.run(once, [address] * 3) == EXPECTED
    assert tasks.gathered == 0


@pytest.mark.parametrize("how", ["refused", "silent", "no name"])
def test_all_tasks_use_spark_if_one_cannot_reach_the_driver(how: str) -> None:
    tasks = Tasks(3)
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        if how == "silent":
            elsewhere.listen()
        host, port = elsewhere.getsockname()
        if how == "no name":
            host = "no-such-host.invalid"
        wrong = f"{host}:{port}:{'00' * 32}"
        with served() as address:
            started = time.monotonic()
            assert tasks.run(once, [address, wrong, address]) == EXPECTED
            assert time.monotonic() - started < 10
    assert tasks.gathered == 1


def test_all_tasks_use_spark_if_one_is_late() -> None:
    def work(number: int, *given: Any) -> Any:
        if number == 1:
            time.sleep(1.5)
        return once(number, *given)

    tasks = Tasks(3)
    with served() as address:
        assert tasks.run(work, [address] * 3) == EXPECTED
    assert tasks.gathered == 1


class Cut:
    """Forwards connections to a server; cuts the first ones once they have sent a message."""

    def __init__(self, address: str, cuts: int) -> None:
        _, port, secret = address.split(":")
        self._target = ("127.0.0.1", int(port))
        self._cuts = cuts
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}:{secret}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            cuts, self._cuts = self._cuts > 0, self._cuts - 1
            far = socket.create_connection(self._target)
            for source, target, limit in ((near, far, None), (far, near, 64 if cuts else None)):
                threading.Thread(target=self._pass, args=(source, target, limit)).start()

    def _pass(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(2**16):
                # The answer to the message comes after the server's nonce and proof.
                if limit is not None and passed >= limit:
                    break
                target.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for end in (source, target):
            # Closing alone neither wakes the other thread nor ends the connection before it wakes.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_task_whose_message_arrived_does_not_fall_back_to_spark() -> None:
    """If the others have the answer, a fallback would deadlock: tasks would await each other."""

    def work(number: int, *given: Any) -> Any:
        try:
            return once(number, *given)
        except PeerLostError as error:
            return str(error)

    tasks = Tasks(3)
    with served() as address:
        link = Cut(address, cuts=1)
        found = tasks.run(work, [address, link.address, address])
        link.close()
    assert found[0] == found[2] == EXPECTED[0]
    assert "has lost the connection to the driver" in found[1]
    assert tasks.gathered == 0
