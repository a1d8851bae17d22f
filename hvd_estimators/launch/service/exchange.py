"""All-gather among the tasks of a barrier job: over the driver, or over Spark.

Spark's own ``allGather`` takes about a second per call, because its tasks poll for the answer once
a second. So each task sends its message to the driver's service, which answers when all messages
have arrived.

Not every task can reach the driver: a firewall may allow only Spark's own connections. If a task's
message is missing, the driver notifies the other tasks, and all of them use ``allGather``. Later
jobs of the application then use it at once. A task that the driver has heard never falls back
alone, because others may have received the answer.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel, reading_message, retry
from hvd_estimators.launch.service.server import DriverService, connect_to_driver

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.task.job import Job

_KIND = "exchange"

# A task's message has some kilobytes.
_MAX_BYTES = 2**30

# Applications with tasks that cannot reach the driver.
_UNREACHABLE_FROM: set[str] = set()

logger = logging.getLogger(__name__)


class Exchange:
    """All-gather of one message per task. Runs in the tasks.

    Every task of the job must call it equally often. Each call waits for all other tasks.

    Parameters
    ----------
    context : BarrierTaskContext
        Context of this task.
    job : Job
        The driver's settings for every task.
    on_sent : callable
        Called when this task's message is sent, and the task waits for the others' messages.
    """

    def __init__(
        self,
        context: BarrierTaskContext,
        job: Job,
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._service = job.service
        self._uses_driver = job.exchanges_over_driver
        self._on_sent = on_sent
        self._number = 0

    def __call__(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather one message per task, in task order.

        Parameters
        ----------
        message : dict
            This task's message; its values must be serializable as JSON.

        Raises
        ------
        UnreachableError
            If the driver has heard this task, and then does not answer.
        """
        if self._uses_driver:
            messages = self._over_driver(message)
            self._number += 1
            if messages is not None:
                return messages
            self._uses_driver = False
        self._on_sent()
        return [json.loads(text) for text in self._context.allGather(json.dumps(message))]

    def _over_driver(self, message: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the messages of all tasks, or None if not all of them reach the driver."""
        request = {"kind": _KIND, "number": self._number, "task": self._context.partitionId()}
        # Other tasks know of a task that the driver has heard, in this exchange or before.
        is_heard = self._number > 0
        patience = timeouts.EXCHANGE_LATER if is_heard else timeouts.EXCHANGE_FIRST
        attempt_seconds = timeouts.EXCHANGE_ATTEMPT
        deadline = time.monotonic() + (patience if is_heard else 0) + attempt_seconds

        def attempt() -> list[dict[str, Any]] | None:
            nonlocal is_heard, deadline
            with connect_to_driver(self._service, attempt_seconds) as channel:
                if not is_heard:
                    is_heard = True
                    deadline = time.monotonic() + patience + attempt_seconds
                channel.send(request, json.dumps(message).encode(), attempt_seconds)
                self._on_sent()
                left = max(deadline - time.monotonic(), attempt_seconds)
                reply, body = channel.receive(left, timeouts.EXCHANGE_ANSWER)
                with reading_message(f"The driver at {channel.peer}"):
                    return unpacked(body) if reply["complete"] else None

        def is_final(error: OSError) -> bool:
            is_refused = isinstance(error, ConnectionRefusedError) and not is_heard
            return is_refused or time.monotonic() >= deadline

        try:
            return retry(attempt, is_final, timeouts.EXCHANGE_PAUSE)
        except OSError as error:
            address = self._service.rpartition(":")[0]
            if not is_heard:
                logger.info("The driver is not reached at %s (%s)", address, error)
                return None
            raise UnreachableError(
                f"{socket.gethostname()} has lost the connection to the driver at {address}, over "
                f"which tasks exchange their addresses: {error}"
            ) from error


def unpacked(body: bytes) -> list[dict[str, Any]]:
    """Return the messages of all tasks from the driver's answer."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(body, _MAX_BYTES)
    if not unpacking.eof:
        raise ValueError(f"the messages are cut, or have more than {_MAX_BYTES} bytes")
    messages: list[dict[str, Any]] = json.loads(text)
    return messages


class ExchangeServer:
    """Driver's side of the exchange; used as a context manager.

    Parameters
    ----------
    service : DriverService
        The launch's service.
    tasks : int
        Number of tasks.
    application : str
        Spark's id of the application.

    Attributes
    ----------
    is_used : bool
        False if tasks of an earlier job of the application did not reach the driver.
    """

    def __init__(self, service: DriverService, tasks: int, application: str) -> None:
        self._tasks = tasks
        self._application = application
        self._changed = threading.Condition()
        self._messages: dict[int, dict[int, bytes]] = {}  # JSON documents
        self._replies: dict[int, bytes] = {}
        self._received_from: set[int] = set()
        self._deadline: float | None = None
        self._is_given_up = self._has_ended = False
        self.is_used = application not in _UNREACHABLE_FROM
        service.add_handler(_KIND, self._reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            # Tasks that were only late have connected by now.
            if exc_type is None and self._is_given_up and len(self._received_from) < self._tasks:
                _UNREACHABLE_FROM.add(self._application)

    def _reply(self, channel: Channel, request: Mapping[str, Any], body: bytes) -> None:
        with reading_message(channel.peer):
            number, task = int(request["number"]), int(request["task"])
            if number < 0 or not 0 <= task < self._tasks:
                raise ValueError(f"exchange {number} of task {task}, among {self._tasks} tasks")
            json.loads(body)
        reply = self._gather(number, task, body)
        is_complete = reply is not None
        channel.send({"complete": is_complete}, reply or b"", timeouts.EXCHANGE_ANSWER)

    def _gather(self, number: int, task: int, message: bytes) -> bytes | None:
        """Record a task's message; return all tasks' messages, or None if some are missing."""
        with self._changed:
            messages = self._messages.setdefault(number, {})
            messages[task] = message
            self._received_from.add(task)
            if self._deadline is None:
                self._deadline = time.monotonic() + timeouts.EXCHANGE_FIRST
            # The driver has heard all tasks that take part in later exchanges.
            later = time.monotonic() + timeouts.EXCHANGE_LATER
            deadline = self._deadline if number == 0 else later

            def is_decided() -> bool:
                return len(messages) == self._tasks or self._is_given_up or self._has_ended

            # Only the last message wakes the other threads.
            if is_decided():
                self._changed.notify_all()
            self._changed.wait_for(is_decided, max(deadline - time.monotonic(), 0))
            if self._is_given_up or len(messages) < self._tasks:
                # From now on this applies to all tasks, including late ones.
                self._is_given_up = True
                self._changed.notify_all()
                return None
            if number not in self._replies:
                in_order = b",".join(messages[task] for task in range(self._tasks))
                # Messages of tasks on one host differ little. Level 1 takes 5 ms for 1,000 tasks.
                self._replies[number] = zlib.compress(b"[" + in_order + b"]", 1)
            return self._replies[number]
