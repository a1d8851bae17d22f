"""Reports of launch stages by tasks, and the driver's warnings about ranks that stay in a stage.

A task reports each stage that it enters, and writes it to its log. The driver warns if a rank stays
in a stage for long, and names the stage, the rank and the host. Before a task's Python reports, the
driver asks Spark where the task runs. Imports little, because tasks import it before anything else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.service.events import Event, EventSender, Handler, RankStage
from hvd_estimators.launch.stage import EXPLANATIONS, Stage

logger = logging.getLogger(__name__)

# Each further warning about the same ranks waits this many times longer than the one before.
_REPEAT_FACTOR = 8
_MOST_NAMED_RANKS = 8


class StageReporter:
    """Reporter of one task's stages. Runs in the task.

    Stages are sent from another thread, so that no task waits for an unreachable driver. If several
    stages wait to be sent, only the last of them is sent.

    Parameters
    ----------
    task : int
        The task's number.
    host : str
        Name of the task's machine.
    address : str
        Address of the driver's service. Without it, stages are only logged.
    writes_log : bool
        Whether stages go to standard error, which is the log of a remote executor.
    """

    def __init__(self, task: int, host: str, address: str, writes_log: bool) -> None:
        self._address = address
        self._writes_log = writes_log
        self._changed = threading.Condition()
        self._current = RankStage(-1, task, host, Stage.PYTHON_START)
        self._sent: int = Stage.PYTHON_START
        self._is_connected = self._is_closed = False
        self._thread = threading.Thread(target=self._send_changes, daemon=True)
        if address:
            self._thread.start()

    def enter(self, stage: Stage, rank: int = -1) -> None:
        """Report a stage; do nothing if the task has already entered it or a later one.

        Parameters
        ----------
        stage : Stage
            The stage.
        rank : int
            The task's rank. Default: the rank of the previous call.
        """
        with self._changed:
            before = self._current
            if stage <= before.stage:
                return
            rank = before.rank if rank < 0 else rank
            self._current = RankStage(rank, before.task, before.host, stage)
            self._changed.notify_all()
        if stage < Stage.ENDED:
            self._log(f"{_title(self._current)}: launch stage '{stage.label}'")

    def close(self) -> None:
        """Report the end of the task and close the connection."""
        self.enter(Stage.ENDED)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._is_connected:
            self._thread.join(timeouts.STAGE_CLOSE)

    def _log(self, line: str) -> None:
        # Spark's Python workers configure no logging, and so drop INFO lines.
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", line)
        elif self._writes_log:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} INFO {line}\n")

    def _send_changes(self) -> None:
        """Send each new stage until the rank has joined the others or the task ends."""
        sender: EventSender | None = None
        while self._sent < Stage.HOROVOD_JOINED:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._current.stage > self._sent)
                current = self._current
            if current.stage <= self._sent:
                break
            if sender is None or not sender.is_connected:
                sender = EventSender(self._address)
            sender.send(current)
            self._is_connected = sender.is_connected
            if self._is_connected:
                self._sent = current.stage
                continue
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, timeouts.STAGE_RETRY):
                    break
        if sender is not None:
            sender.close()


@dataclass(frozen=True)
class LaunchState:
    """State of a launch.

    Attributes
    ----------
    num_ranks : int
        Number of ranks.
    stage : Stage
        The earliest stage that a rank is in.
    waiting : int
        Number of ranks in that stage.
    """

    num_ranks: int
    stage: Stage
    waiting: int


_observer: ContextVar[Callable[[LaunchState], None] | None] = ContextVar("observer", default=None)


@contextlib.contextmanager
def observing_launches(observe: Callable[[LaunchState], None]) -> Iterator[None]:
    """Report the state of each launch that this thread begins in the block.

    Parameters
    ----------
    observe : callable
        Called with each change, from any thread. It must neither wait nor raise.
    """
    token = _observer.set(observe)
    try:
        yield
    finally:
        _observer.reset(token)


def started_task(task: int, host: str) -> RankStage:
    """Return the stage of a task that Spark has started; the host is empty if unknown."""
    return RankStage(-1, task, host, Stage.PYTHON_START)


class LaunchWatch:
    """Watch over the stages of a launch. Runs on the driver; used as a context manager.

    A thread warns if tasks stay in the earliest stage of all tasks for 10 seconds, or for 20 if the
    driver's machine is busy. It warns again if the stage or the tasks change, and otherwise rarely.
    It ends when all ranks have joined. There
    is no warning while all ranks run their function or have ended, because a function need not call
    ``hvd.init()``.

    Parameters
    ----------
    num_ranks : int
        Number of ranks.
    host : str
        Name of the machine on which this process starts the ranks. Empty if Spark's tasks start
        them.
    """

    def __init__(self, num_ranks: int, host: str = "") -> None:
        self._running_tasks: Callable[[], Sequence[RankStage] | None] | None = None
        self._host = host
        self._lock = threading.Lock()
        first = Stage.PROCESS_START if host else Stage.TASK_SLOT
        now = time.monotonic()
        self._stages = {
            number: (RankStage(number if host else -1, number, host, first), now)
            for number in range(num_ranks)
        }
        self._counts = Counter(at.stage for at, _ in self._stages.values())
        self._warned: list[RankStage] = []
        self._pause = self._next_warning = 0.0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._observer = _observer.get()
        self._observe()

    def with_running_tasks(self, running_tasks: Callable[[], Sequence[RankStage] | None]) -> Self:
        """Set the function that returns the tasks that Spark has started, see `started_task`.

        It finds tasks whose Python has not reported. It returns None while the launch waits its
        turn, because other launches of this package hold the task slots.
        """
        self._running_tasks = running_tasks
        return self

    def handler(self, handler: Handler) -> Handler:
        """Return an event handler that records stages and passes on all other events."""

        def handle(event: Event) -> None:
            if isinstance(event, RankStage):
                self.record(event)
            else:
                handler(event)

        return handle

    def record(self, event: RankStage) -> None:
        """Record the stage of a task, unless the task is already known to be in a later one.

        Raises
        ------
        ValueError
            If a task reports a stage that this version does not have.
        """
        Stage(event.stage)
        with self._lock:
            before, _ = self._stages.get(event.task, (event, 0.0))
            if event.stage > before.stage:
                self._stages[event.task] = event, time.monotonic()
                self._counts[before.stage] -= 1
                self._counts[event.stage] += 1
                self._observe()
                if event.stage < Stage.ENDED:
                    logger.info("%s: launch stage '%s'", _title(event), Stage(event.stage).label)

    def record_rank(self, rank: int, stage: Stage) -> None:
        """Record the stage of a rank that this process has started."""
        self.record(RankStage(rank, rank, self._host, stage))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._finished.set()
        self._thread.join()

    def _observe(self) -> None:
        if self._observer is not None:
            earliest = min(stage for stage, number in self._counts.items() if number)
            number = self._counts[earliest]
            self._observer(LaunchState(len(self._stages), Stage(earliest), number))

    def _watch(self) -> None:
        while not self._finished.wait(timeouts.STAGE_POLL):
            if self._is_complete():
                return
            self._ask_spark()
            self._warn(time.monotonic())

    def _is_complete(self) -> bool:
        with self._lock:
            return all(at.stage >= Stage.HOROVOD_JOINED for at, _ in self._stages.values())

    def _ask_spark(self) -> None:
        """Record the tasks that Spark has started, and whose Python has not reported."""
        with self._lock:
            is_waiting = any(at.stage == Stage.TASK_SLOT for at, _ in self._stages.values())
        if not is_waiting or self._running_tasks is None:
            return
        try:
            running = self._running_tasks()
        except Exception:
            logger.debug("Spark does not answer which tasks run", exc_info=True)
            return
        for task in running or ():
            self.record(task)
        if running is None:
            now = time.monotonic()
            with self._lock:
                for number, (at, _) in self._stages.items():
                    if at.stage == Stage.TASK_SLOT:
                        self._stages[number] = at, now

    def _warn(self, now: float) -> None:
        with self._lock:
            reached = {at.stage for at, _ in self._stages.values()}
            stage = min(reached)
            if stage == Stage.FUNCTION and reached <= {stage, Stage.ENDED}:
                return
            waiting = [
                (at, now - since) for at, since in self._stages.values() if at.stage == stage
            ]
        limit = timeouts.STAGE_WARNING_IF_BUSY if is_busy() else timeouts.STAGE_WARNING
        late = [at for at, seconds in waiting if seconds >= limit]
        if not late or stage >= Stage.HOROVOD_JOINED:
            return
        is_new = late != self._warned
        if not is_new and now < self._next_warning:
            return
        self._pause = _REPEAT_FACTOR * (limit if is_new else self._pause)
        self._warned, self._next_warning = late, now + self._pause
        logger.warning(
            "The launch waits for %s, in stage '%s' for %.0f s: %s.",
            *(_titles(late), Stage(stage).label, max(seconds for _, seconds in waiting)),
            EXPLANATIONS[Stage(stage)],
        )


def is_busy() -> bool:
    """Return whether more processes want to run on this machine than it has cores."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def _title(at: RankStage) -> str:
    """Return a rank's name and host, or its task's while the rank is not assigned."""
    name = f"rank {at.rank}" if at.rank >= 0 else f"the rank of task {at.task}"
    return f"{name} on {at.host}" if at.host else name


def _titles(ranks: Sequence[RankStage]) -> str:
    named = ", ".join(map(_title, ranks[:_MOST_NAMED_RANKS]))
    more = len(ranks) - _MOST_NAMED_RANKS
    return f"{named} and {more} more ranks" if more > 0 else named
