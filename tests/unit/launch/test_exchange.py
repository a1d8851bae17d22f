"""What tasks tell each other: over the driver where all reach it, else as Spark does it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch.rendezvous.channel import Channel, exchange_key, new_secret
from hvd_estimators.launch.task import exchange as module
from hvd_estimators.launch.task.exchange import Exchange, ExchangeServer

pytestmark = pytest.mark.timeout(60)

SECRET = new_secret()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(module, "_LATE_SECONDS", 1.0)
    monkeypatch.setattr(module, "_LATER_SECONDS", 2.0)
    monkeypatch.setattr(module, "_APART", set())


class Tasks:
    """Tasks in threads, with Spark's way between them, which is counted."""

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

    def run(self, work: Callable[[int, Exchange], Any], places: list[str]) -> list[Any]:
        def task(number: int) -> Any:
            job: Any = SimpleNamespace(exchange=places[number], secret=SECRET)
            return work(number, Exchange(self.context(number), job))

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(task, range(self.number)))


def twice(number: int, exchange: Exchange) -> Any:
    return exchange({"of": number}), exchange({"again": [number, "größe"]})


EXPECTED = [
    ([{"of": n} for n in range(3)], [{"again": [n, "größe"]} for n in range(3)]),
] * 3


def test_all_get_what_all_say_in_the_order_of_the_tasks() -> None:
    tasks = Tasks(3)
    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        assert tasks.run(twice, [server.place] * 3) == EXPECTED
    assert tasks.gathered == 0
    assert not module._APART


@pytest.mark.parametrize("how", ["refused", "silent", "no name"])
def test_where_one_task_does_not_reach_the_driver_all_use_sparks_way(how: str) -> None:
    tasks = Tasks(3)
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        if how == "silent":
            elsewhere.listen()
        wrong = f"127.0.0.1:{elsewhere.getsockname()[1]}"
        if how == "no name":
            wrong = "no-such-host.invalid:7"
        with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
            started = time.monotonic()
            assert tasks.run(twice, [server.place, wrong, server.place]) == EXPECTED
            assert time.monotonic() - started < 10
    assert tasks.gathered == 2
    # The next job of the application does not try again; another application does.
    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        assert server.place == ""
        assert tasks.run(twice, [server.place] * 3) == EXPECTED
    assert tasks.gathered == 4
    assert ExchangeServer(SECRET, "127.0.0.1", 3, "another").place


def test_a_task_that_is_only_late_is_told_and_changes_nothing_for_later_jobs() -> None:
    def work(number: int, exchange: Exchange) -> Any:
        if number == 1:
            time.sleep(1.5)
        return twice(number, exchange)

    tasks = Tasks(3)
    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        assert tasks.run(work, [server.place] * 3) == EXPECTED
    assert tasks.gathered == 2
    assert not module._APART


def test_a_job_that_failed_says_nothing_of_the_network() -> None:
    def leave(number: int, exchange: Exchange) -> Any:
        return exchange._over_driver({}) if number == 0 else None

    def fail() -> None:
        with ExchangeServer(SECRET, "127.0.0.1", 2, "app") as server:
            assert Tasks(2).run(leave, [server.place] * 2) == [None, None]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not module._APART


class Cut:
    """Passes connections on to a server, and cuts those that have sent a message at first."""

    def __init__(self, place: str, cuts: int) -> None:
        self._target = ("127.0.0.1", int(place.rpartition(":")[2]))
        self._cuts = cuts
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._socket.getsockname()[1]}"
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
                # The answer to the message comes after the server's number and proof.
                if limit is not None and passed >= limit:
                    break
                target.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for end in (source, target):
            # Closing alone does not wake the other thread, and ends nothing before it wakes.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_an_answer_that_gets_lost_is_asked_for_again() -> None:
    tasks = Tasks(3)
    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        link = Cut(server.place, cuts=2)
        assert tasks.run(twice, [server.place, link.place, server.place]) == EXPECTED
        link.close()
    assert tasks.gathered == 0


def test_who_was_heard_and_gets_no_answer_does_not_go_another_way() -> None:
    """The others may have had the answer: they would wait for each other for ever."""

    def work(number: int, exchange: Exchange) -> Any:
        try:
            return exchange({"of": number})
        except UnreachableError as error:
            return str(error)

    tasks = Tasks(3)
    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        link = Cut(server.place, cuts=1000)
        found = tasks.run(work, [server.place, link.place, server.place])
        link.close()
    assert found[0] == found[2] == EXPECTED[0][0]
    assert "has lost touch with the driver" in found[1]
    assert tasks.gathered == 0


def test_strangers_are_not_heard_and_change_nothing() -> None:
    def knock(place: str, secret: bytes) -> None:
        host, _, port = place.rpartition(":")
        with socket.create_connection((host, int(port)), 5) as connection:
            channel = Channel.connect(connection, secret, 5)
            channel.send({"exchange": 0, "task": 0}, json.dumps({"of": "a stranger"}).encode())
            channel.receive(0.3)

    with ExchangeServer(SECRET, "127.0.0.1", 3, "app") as server:
        for secret in (new_secret(), SECRET, exchange_key(new_secret())):
            with pytest.raises((ConnectionError, TimeoutError)):
                knock(server.place, secret)
        assert Tasks(3).run(twice, [server.place] * 3) == EXPECTED
