"""Leases of several processes, in all orders of their requests to the store.

Each process runs the package's own code in a thread. Its store stops it before each request, and a
schedule picks the process whose request takes effect next. A request that is late, by any time, is
one that the schedule picks late. No Spark.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from variants import others_in_soak

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store import leases
from hvd_estimators.store.leases import FencingToken, Lease
from hvd_estimators.store.paths import RunPaths

RUN = RunPaths("mine", "runs/mine", None, None)


class Died(BaseException):
    """The process was killed before this request."""


class Process:
    """Process whose requests take effect one by one, and its view of the shared files.

    Parameters
    ----------
    files : dict
        The files of all processes.
    program : callable
        What the process does.
    """

    def __init__(self, files: dict[str, bytes], program: Callable[[Process], None]) -> None:
        self.files = files
        store: Any = self
        self.lease = Lease(store, RUN)
        self.is_killed = self.is_over = False
        self._error: BaseException | None = None
        self._program = program
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._waits.acquire(timeout=60)

    def step(self) -> None:
        """Let the pending request take effect, and wait for the next one."""
        self._may_go.release()
        assert self._waits.acquire(timeout=60)
        if self._error is not None:
            raise self._error

    def kill(self) -> None:
        """End the process before its pending request."""
        self.is_killed = True
        self.lease.stop(delete=False)
        while not self.is_over:
            self.step()

    def look_dead(self) -> None:
        """Let others take the process for dead, while it goes on."""
        leases._alive.pop(self.lease.token, None)

    def _run(self) -> None:
        try:
            with contextlib.suppress(Died):
                self._program(self)
        except BaseException as error:
            self._error = error
        self.is_over = True
        self.lease.stop(delete=False)
        self._waits.release()

    def _request(self) -> None:
        self._waits.release()
        assert self._may_go.acquire(timeout=60)
        if self.is_killed:
            raise Died

    def names(self, path: str) -> list[str]:
        self._request()
        return sorted(name.removeprefix(f"{path}/") for name in self.files)

    def read_if_exists(self, path: str) -> bytes | None:
        self._request()
        return self.files.get(path)

    def write_new(self, path: str, text: str) -> bool:
        self._request()
        return self.files.setdefault(path, text.encode()) == text.encode()

    def write_text(self, path: str, text: str) -> None:
        self._request()
        self.files[path] = text.encode()

    def delete(self, path: str) -> None:
        self._request()
        self.files.pop(path, None)


def orders_of(number: int) -> int:
    """Let processes take a free run at once, in all orders; return the number of orders."""
    prefix: list[int] = []
    for count in itertools.count(1):
        got: list[Process] = []
        refused: list[Process] = []

        def take(process: Process, got: Any = got, refused: Any = refused) -> None:
            try:
                process.lease.start()
            except ParamError:
                refused.append(process)
            else:
                got.append(process)

        files: dict[str, bytes] = {}
        processes = [Process(files, take) for _ in range(number)]
        choices: list[tuple[int, int]] = []
        while running := [process for process in processes if not process.is_over]:
            choice = prefix[len(choices)] if len(choices) < len(prefix) else 0
            choices.append((choice, len(running)))
            running[choice].step()
            # Others see that a winner is alive.
            leases._alive.update({process.lease.token: process.lease for process in got})
        for process in got:
            process.look_dead()
        assert (len(got), len(refused)) == (1, number - 1), choices
        while choices and choices[-1][0] == choices[-1][1] - 1:
            choices.pop()
        if not choices:
            return count
        prefix = [choice for choice, _ in choices]
        prefix[-1] += 1
    raise AssertionError


@pytest.mark.parametrize("number", others_in_soak(2, 3))
def test_exactly_one_process_takes_a_free_run_in_each_order_of_requests(number: int) -> None:
    assert orders_of(number) >= 30


# Requests of one driver, while the others wait.
EVENTS: Any = st.integers(1, 20) | st.sampled_from([1, 2, 3, "is killed", "looks dead"])


class Drivers:
    """Drivers that want one run, some of which are killed or taken for dead.

    Parameters
    ----------
    number : int
        Number of drivers.
    """

    def __init__(self, number: int) -> None:
        self.training: dict[Process, int] = {}
        self.generations: set[int] = set()
        self.looked_dead: set[Process] = set()
        self.refused = self.finished = 0
        files = {f"{RUN.run_path}/metadata.json": b"{}"}
        self.processes = [Process(files, self._train) for _ in range(number)]

    def run(self, events: list[tuple[int, str | int]]) -> None:
        """Run all drivers, in the order of some events: a driver, and what it does."""
        for number, event in itertools.chain(events, itertools.repeat((0, 1))):
            running = [process for process in self.processes if not process.is_over]
            if not running:
                return
            process = running[number % len(running)]
            if event == "is killed":
                process.kill()
                self.training.pop(process, None)
            elif event == "looks dead" and process.lease.token in leases._alive:
                self.looked_dead.add(process)
                process.look_dead()
            elif isinstance(event, int):
                for _ in range(event):
                    if not process.is_over:
                        process.step()

    def _train(self, process: Process) -> None:
        lease: Any = process.lease
        try:
            lease.start()
        except ParamError:
            self.refused += 1
            return
        alive = self.training.keys() - self.looked_dead
        assert process in self.looked_dead or not alive, "two processes train"
        for launch in range(2):
            if launch:
                lease.advance()
            self.training[process] = lease.generation
            token = FencingToken(RUN.run_path, lease.generation, lease.token)
            is_replaced = max(self.generations, default=0) > lease.generation
            self.generations.add(lease.generation)
            store: Any = process
            try:
                token.check(store)
            except StoreError:
                assert process in self.looked_dead
            else:
                assert not is_replaced, "a process that was replaced saves"
            lease.beat()
        del self.training[process]
        lease.stop()
        self.finished += 1


@pytest.mark.parametrize("examples", others_in_soak(200, 20_000))
def test_no_process_saves_after_another_has_replaced_it(examples: int) -> None:
    seen = dict.fromkeys(("refused", "finished", "looked_dead", "killed"), 0)

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.integers(2, 3), st.lists(st.tuples(st.integers(0, 2), EVENTS), max_size=30))
    def check(number: int, events: list[tuple[int, str | int]]) -> None:
        drivers = Drivers(number)
        drivers.run(events)
        killed = sum(process.is_killed for process in drivers.processes)
        assert drivers.refused + drivers.finished + killed >= number
        # Once all have ended, the run is free.
        store: Any = drivers.processes[0]
        follower = Drivers(1)
        follower.processes[0].files.update(store.files)
        follower.run([])
        assert follower.finished == 1
        seen["refused"] += drivers.refused
        seen["finished"] += drivers.finished
        seen["looked_dead"] += len(drivers.looked_dead)
        seen["killed"] += killed

    check()
    assert all(seen.values()), seen
