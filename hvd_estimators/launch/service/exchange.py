"""All-gather among the tasks of a barrier job: over the driver, or over Spark.

Spark's own ``allGather`` takes about a second, because its tasks poll for the answer once a second.
So each task sends its message to the driver, which answers when all messages have arrived.

Not every task can reach the driver: a firewall may allow only Spark's own connections. If a task's
message is missing, the driver notifies the other tasks, and all of them use ``allGather``. A task
that the driver has heard never falls back alone, because others may have received the answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel
from hvd_estimators.launch.rendezvous.client import PeerLostError
from hvd_estimators.launch.rendezvous.server import Failure
from hvd_estimators.launch.service.events import EventSender, RankStage
from hvd_estimators.launch.stage import Stage

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

EXCHANGE = "exchange"
"""Kind of a task's message to the others."""


def exchange(
    context: BarrierTaskContext, driver: EventSender, message: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All-gather one message per task, in task order. Every task of the job calls it once.

    Parameters
    ----------
    context : BarrierTaskContext
        Context of this task.
    driver : EventSender
        Connection to the driver; if it is not connected, Spark gathers the messages.
    message : mapping
        This task's message; its values must be serializable as JSON.

    Raises
    ------
    PeerLostError
        If the connection to the driver is lost. The task is the lost one, since it has no rank yet.
    """
    text = json.dumps(message)
    if driver.is_connected:
        task, host = context.partitionId(), socket.gethostname()
        request = {"kind": EXCHANGE, "task": task, "host": host}
        try:
            reply, body = driver.ask(request, text.encode(), timeouts.EXCHANGE_WAIT)
            if reply["complete"]:
                messages: list[dict[str, Any]] = json.loads(zlib.decompress(body))
                return messages
        except OSError as error:
            # No fallback: the others may have received the answer.
            why = "has lost the connection to the driver, over which tasks exchange their addresses"
            raise PeerLostError(Failure(task, host, f"{why} ({error})", lost=True)) from error
    return [json.loads(each) for each in context.allGather(text)]


class ExchangeServer:
    """Driver's side of the exchange; used as a context manager.

    Parameters
    ----------
    tasks : int
        Number of tasks.
    on_stage : callable
        Called with the stage of each task whose message has arrived.
    """

    def __init__(self, tasks: int, on_stage: Callable[[RankStage], object]) -> None:
        self._tasks = tasks
        self._on_stage = on_stage
        self._changed = threading.Condition()
        self._messages: dict[int, bytes] = {}  # JSON documents
        self._reply = b""
        self._deadline = float("inf")
        self._is_given_up = self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def answer(self, channel: Channel, request: Mapping[str, Any], body: bytes) -> None:
        """Answer a task's message when all messages have arrived, or the tasks use Spark."""
        task, host = int(request["task"]), str(request["host"])
        if not 0 <= task < self._tasks:
            raise ValueError(f"task {task}, among {self._tasks} tasks")
        json.loads(body)
        self._on_stage(RankStage(-1, task, host, Stage.STARTED))
        reply = self._gather(task, body)
        channel.send({"complete": bool(reply)}, reply, timeouts.EXCHANGE_ANSWER)

    def _gather(self, task: int, message: bytes) -> bytes:
        """Record a task's message; return all tasks' messages, or nothing if some are missing."""
        with self._changed:
            if not self._messages:
                self._deadline = time.monotonic() + timeouts.EXCHANGE
            self._messages[task] = message

            def is_decided() -> bool:
                is_complete = len(self._messages) == self._tasks
                return is_complete or self._is_given_up or self._has_ended

            # Only the last message wakes the other threads.
            if is_decided():
                self._changed.notify_all()
            self._changed.wait_for(is_decided, max(self._deadline - time.monotonic(), 0))
            if self._is_given_up or len(self._messages) < self._tasks:
                # From now on this applies to all tasks, including late ones.
                self._is_given_up = True
                self._changed.notify_all()
                return b""
            if not self._reply:
                in_order = b",".join(self._messages[task] for task in range(self._tasks))
                # Messages of tasks on one host differ little. Level 1 takes 5 ms for 1,000 tasks.
                self._reply = zlib.compress(b"[" + in_order + b"]", 1)
            return self._reply
