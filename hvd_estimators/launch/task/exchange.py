"""All-gather among the tasks of a barrier job: over the driver, or over Spark.

Spark's own ``allGather`` takes about a second per call, because its tasks poll for the answer once
a second. So each task sends its message to a small server on the driver, which answers when all
messages have arrived.

Not every task can reach the server: a firewall may allow only Spark's own connections. If a task's
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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from hvd_estimators.exceptions import UnreachableError
from hvd_estimators.launch.rendezvous.channel import Channel, Listener, exchange_key

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

    from hvd_estimators.launch.task.job import Job

__all__ = ["Exchange", "ExchangeServer"]

_ATTEMPT_SECONDS = 3.0
# Counts from the first task's message, for tasks whose Python starts late.
_LATE_SECONDS = 8.0
# Tasks may probe each other's hosts for a minute between two exchanges.
_LATER_SECONDS = 150.0
_PAUSE_SECONDS = 0.2

# Applications with tasks that cannot reach the driver.
_APART: set[str] = set()

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
        self._secret = job.secret
        self._place = job.exchange
        self._on_sent = on_sent
        self._number = 0

    def __call__(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather one message per task, in task order.

        Parameters
        ----------
        mine : dict
            This task's message; its values must be serializable as JSON.

        Raises
        ------
        UnreachableError
            If the driver has heard this task, and then does not answer.
        """
        if self._place:
            found = self._over_driver(mine)
            self._number += 1
            if found is not None:
                return found
            self._place = ""
        self._on_sent()
        return [json.loads(text) for text in self._context.allGather(json.dumps(mine))]

    def _over_driver(self, mine: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the messages of all tasks, or None if not all of them reach the driver."""
        host, _, port = self._place.rpartition(":")
        message = {"exchange": self._number, "task": self._context.partitionId()}
        # Other tasks know of a task that the driver has heard, in this exchange or before.
        is_heard = self._number > 0
        patience = _LATER_SECONDS if is_heard else _LATE_SECONDS
        deadline = time.monotonic() + (patience if is_heard else 0) + _ATTEMPT_SECONDS
        while True:
            try:
                with socket.create_connection((host, int(port)), _ATTEMPT_SECONDS) as connection:
                    channel = Channel.connect(
                        connection, exchange_key(self._secret), _ATTEMPT_SECONDS
                    )
                    if not is_heard:
                        is_heard = True
                        deadline = time.monotonic() + patience + _ATTEMPT_SECONDS
                    channel.send(message, json.dumps(mine).encode(), _ATTEMPT_SECONDS)
                    self._on_sent()
                    left = max(deadline - time.monotonic(), _ATTEMPT_SECONDS)
                    answer, body = channel.receive(left, _ATTEMPT_SECONDS)
                    return json.loads(body) if answer["complete"] else None
            except OSError as error:
                is_refused = isinstance(error, ConnectionRefusedError) and not is_heard
                if time.monotonic() < deadline and not is_refused:
                    time.sleep(_PAUSE_SECONDS)
                    continue
                if not is_heard:
                    logger.info("The driver is not reached at %s (%s)", self._place, error)
                    return None
                raise UnreachableError(
                    f"{socket.gethostname()} has lost touch with the driver, at {self._place}, "
                    f"over which tasks tell each other where they are: {error}"
                ) from error


class ExchangeServer:
    """Driver's side of the exchange; used as a context manager.

    Parameters
    ----------
    secret : bytes
        The job's secret.
    host : str
        The address at which tasks reach the driver.
    tasks : int
        Number of tasks.
    application : str
        Spark's id of the application.

    Attributes
    ----------
    place : str
        Address of the server, for `hvd_estimators.launch.task.job.Job`. Empty if it cannot listen,
        or if tasks of an earlier job of the application did not connect.
    """

    def __init__(self, secret: bytes, host: str, tasks: int, application: str) -> None:
        self._key = exchange_key(secret)
        self._tasks = tasks
        self._application = application
        self._changed = threading.Condition()
        self._said: dict[int, dict[int, Any]] = {}
        self._came: set[int] = set()
        self._deadline: float | None = None
        self._is_given_up = self._has_ended = False
        self._listener: Listener | None = None
        self.place = ""
        if application in _APART:
            return
        try:
            self._listener = Listener.at_host(host, self._serve)
        except OSError as error:
            logger.info("Tasks cannot tell each other of themselves over the driver (%s)", error)
        else:
            self.place = self._listener.place

    def __enter__(self) -> Self:
        if self._listener is not None:
            self._listener.listen()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            # Tasks that were only late have connected by now.
            if exc is None and self._is_given_up and len(self._came) < self._tasks:
                _APART.add(self._application)
        if self._listener is not None:
            self._listener.close()

    def _serve(self, connection: socket.socket, proved: Callable[[], None]) -> None:
        channel = Channel.accept(connection, self._key, _ATTEMPT_SECONDS)
        proved()
        message, body = channel.receive(_ATTEMPT_SECONDS, _ATTEMPT_SECONDS)
        found = self._take(int(message["exchange"]), int(message["task"]), json.loads(body))
        document = b"" if found is None else json.dumps(found).encode()
        channel.send({"complete": found is not None}, document, _ATTEMPT_SECONDS)

    def _take(self, number: int, task: int, said: Any) -> Sequence[Any] | None:
        """Record a task's message; return all tasks' messages, or None if some are missing."""
        with self._changed:
            messages = self._said.setdefault(number, {})
            messages[task] = said
            self._came.add(task)
            self._changed.notify_all()
            if self._deadline is None:
                self._deadline = time.monotonic() + _LATE_SECONDS
            # The driver has heard all tasks that take part in later exchanges.
            deadline = self._deadline if number == 0 else time.monotonic() + _LATER_SECONDS

            def decided() -> bool:
                return len(messages) == self._tasks or self._is_given_up or self._has_ended

            self._changed.wait_for(decided, max(deadline - time.monotonic(), 0))
            if self._is_given_up or len(messages) < self._tasks:
                # From now on this applies to all tasks, including late ones.
                self._is_given_up = True
                self._changed.notify_all()
                return None
            return [messages[task] for task in range(self._tasks)]
