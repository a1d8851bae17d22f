"""Events from ranks to the driver: progress, epochs, messages and output.

Events travel as messages of `hvd_estimators.launch.rendezvous.channel`. Both ends prove that they
know a secret, which ranks get in their environment. So events from other senders are not accepted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from hvd_estimators.launch.rank.graceful_stop import AwaitedRanks
from hvd_estimators.launch.rank.output import Relay, shortened
from hvd_estimators.launch.rendezvous.channel import Channel, Listener, new_secret

__all__ = [
    "EVENTS_VARIABLE",
    "Event",
    "EventSender",
    "Handler",
    "RankEpoch",
    "RankMessage",
    "RankOutput",
    "RankProgress",
    "RankStage",
    "decoded",
    "encoded",
    "log_to_driver",
    "receive_events",
    "serialized",
]


@dataclass(frozen=True)
class RankProgress:
    """Progress of a rank; rank 0 reports it for all ranks.

    Attributes
    ----------
    rank : int
        The reporting rank.
    epoch : int
        The current epoch, from 0.
    epochs : int
        Number of epochs of the whole run.
    step : int
        Completed steps of the epoch.
    steps : int
        Number of steps of an epoch.
    rows_per_second : float
        Rows per second of all ranks, since the start of the epoch.
    means : mapping of str to float
        Means of the measurements over the epoch so far.
    done : bool
        Whether the epoch has ended.
    """

    kind: ClassVar[str] = "progress"

    rank: int
    epoch: int
    epochs: int
    step: int
    steps: int
    rows_per_second: float
    means: Mapping[str, float] = field(default_factory=dict)
    done: bool = False


@dataclass(frozen=True)
class RankEpoch:
    """Measurements of a completed epoch; rank 0 reports them for all ranks.

    Attributes
    ----------
    rank : int
        The reporting rank.
    epoch : int
        The epoch, from 0.
    rows : sequence of (str, str, float)
        Stage (``"train"`` or ``"validation"``), name and value of each measurement.
    """

    kind: ClassVar[str] = "epoch"

    rank: int
    epoch: int
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class RankOutput:
    """Line of a rank's output.

    Attributes
    ----------
    rank : int
        The rank.
    line : str
        The line with its line ending; of a long line, only the two ends. If lines were dropped
        because they were not read for long, a line reports how many.
    stream : str
        ``"stdout"`` or ``"stderr"``; empty if the two are not separated.
    time : float
        Time of arrival on the driver, in seconds since the epoch; 0 if it should not be shown.
    """

    kind: ClassVar[str] = "output"

    rank: int
    line: str
    stream: str = ""
    time: float = 0.0

    def text(self) -> str:
        """Return the line for display, as ``horovod.spark.run`` shows it if its stream is known."""
        when = time.asctime(time.localtime(self.time)) if self.time else ""
        between = f"<{self.stream}>:" if self.stream else " "
        return f"{when}[{self.rank}]{between}{self.line}"


@dataclass(frozen=True)
class RankMessage:
    """Message from a rank to the driver; see `hvd_estimators.log_to_driver`.

    Attributes
    ----------
    rank : int
        The sending rank.
    message : str
        The message; of a long message, only the two ends.
    """

    kind: ClassVar[str] = "message"

    rank: int
    message: str


@dataclass(frozen=True)
class RankStage:
    """Stage of a rank's launch, sent by the rank's task; handlers of users do not receive it.

    Attributes
    ----------
    rank : int
        The rank; -1 while the task has none.
    task : int
        The number of the rank's task.
    host : str
        Name of the task's machine.
    stage : int
        A `hvd_estimators.launch.service.stages.Stage`.
    """

    kind: ClassVar[str] = "stage"

    rank: int
    task: int
    host: str
    stage: int


Event = RankProgress | RankEpoch | RankOutput | RankMessage | RankStage


Handler = Callable[[Event], None]
"""Called on the driver with one event at a time, from another thread."""


_KINDS: dict[str, Callable[..., Event]] = {
    kind.kind: kind for kind in (RankProgress, RankEpoch, RankOutput, RankMessage, RankStage)
}


def encoded(event: Event) -> dict[str, Any]:
    """Return an event as a message."""
    return {"kind": event.kind, **asdict(event)}


def decoded(message: Mapping[str, Any]) -> Event:
    """Return the event in a message."""
    values = dict(message)
    return _KINDS[values.pop("kind")](**values)


EVENTS_VARIABLE = "HVD_ESTIMATORS_EVENTS"
"""Environment variable with the address to which ranks send events: ``host:port:secret``."""


_CONNECT_SECONDS = 5.0


_DRAIN_SECONDS = 1.0


# Maximum wait for the handler to process the last events, while events still arrive.
_LAST_EVENTS_SECONDS = 60.0


# Events may be days apart, and a rank may be stopped while it sends one.
_IDLE_SECONDS = 30 * 86400.0


_SILENCE_SECONDS = 60.0


logger = logging.getLogger(__name__)


_SEVERAL = "several"


_AWAITED = "awaited"


def serialized(handler: Handler) -> Handler:
    """Return a handler that several threads may call, and that never raises."""
    lock = threading.Lock()

    def handle(event: Event) -> None:
        with lock:
            try:
                handler(event)
            except Exception:
                logger.exception("An event of a rank could not be handled")

    return handle


@contextlib.contextmanager
def receive_events(handler: Handler, host: str) -> Iterator[dict[str, str]]:
    """Call a handler for every event until the block ends. Runs on the driver.

    If an error or an interrupt ends the block, waits for ranks that have requested time.

    Parameters
    ----------
    handler : callable
        Called with one event at a time, from another thread.
    host : str
        The address at which ranks reach this machine.

    Yields
    ------
    dict
        Environment variables for the ranks.
    """
    secret = new_secret()
    lock = threading.Lock()
    ended = threading.Event()
    awaited = AwaitedRanks()
    handled = 0

    def handle(message: Mapping[str, Any]) -> None:
        nonlocal handled
        for one in message["events"] if message.get("kind") == _SEVERAL else [message]:
            with lock:
                if ended.is_set():
                    return
                handled += 1
                try:
                    handler(decoded(one))
                except Exception:
                    logger.exception("An event of a rank could not be handled")

    def serve(connection: socket.socket, proved: Callable[[], None]) -> None:
        channel = Channel.accept(connection, secret, _CONNECT_SECONDS)
        proved()
        try:
            while not ended.is_set():
                message, _ = channel.receive(_IDLE_SECONDS, _SILENCE_SECONDS)
                if message.get("kind") == _AWAITED:
                    awaited.add(id(channel), message["seconds"])
                else:
                    handle(message)
        finally:
            awaited.discard(id(channel))

    def drain(listener: Listener) -> None:
        """Wait for pending events as long as some of them arrive."""
        deadline = time.monotonic() + _LAST_EVENTS_SECONDS
        before = -1
        while not listener.drain(_DRAIN_SECONDS):
            if handled == before:
                return  # a rank stays connected
            if time.monotonic() > deadline:
                logger.warning("What ranks printed last is not shown: it is taken too slowly.")
                return
            before = handled

    with Listener.at_host(host, serve) as listener:
        listener.listen()
        try:
            yield {EVENTS_VARIABLE: f"{listener.place}:{secret.hex()}"}
        except BaseException:
            awaited.wait()
            raise
        finally:
            # Ended ranks have closed their connections, so handle all pending events.
            drain(listener)
            with lock:
                ended.set()


class EventSender:
    """Sender of events to the driver; does nothing if no receiver is configured.

    Runs on the worker. Training never fails because of an event: the first error ends the sending.

    Parameters
    ----------
    target : str, optional
        Address of the receiver. Default: the value of `EVENTS_VARIABLE`.
    patience : float
        Seconds that the driver may take for one event.
    """

    def __init__(self, target: str | None = None, patience: float = 5.0) -> None:
        self._patience = patience
        target = target or os.environ.get(EVENTS_VARIABLE)
        self._socket: socket.socket | None = None
        if not target:
            return
        host, port, secret = target.rsplit(":", 2)
        try:
            self._socket = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            self._channel = Channel.connect(self._socket, bytes.fromhex(secret), _CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            logger.info(
                "No progress on the driver: cannot reach it at %s:%s (%s)", host, port, error
            )
            self.close()

    @property
    def is_connected(self) -> bool:
        """True if events can reach the driver, as far as is known."""
        return self._socket is not None

    def send(self, event: Event) -> None:
        """Send one event."""
        self._send(encoded(event))

    def send_all(self, events: Sequence[Event]) -> None:
        """Send several events at once."""
        self._send({"kind": _SEVERAL, "events": [encoded(event) for event in events]})

    def ask_to_wait(self, seconds: float) -> None:
        """Ask the driver to wait for this sender to close if the driver is interrupted.

        The driver waits for ``seconds`` at most. Called by ranks that save their state when they
        are asked to end.
        """
        self._send({"kind": _AWAITED, "seconds": seconds})

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._socket is None:
            return
        try:
            self._channel.send(message, seconds=self._patience)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection, which also stops another thread that is sending."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


_MOST_CHARS = 8192


# A driver may be slow, such as a sleeping laptop.
_SEND_SECONDS = 3600.0


_CLOSE_SECONDS = 5.0


def log_to_driver(message: object) -> None:
    """Print a line on the driver's standard output while the ranks run. Called by a rank.

    Replaces ``sparkdl.horovod.log_to_driver``. Training does not wait for the driver. If the driver
    reads messages too slowly, some are dropped, and a line reports how many. Without a receiver, as
    in a program without ranks, the message is printed here.

    Parameters
    ----------
    message : object
        Its text is sent; of a text with more than 8192 characters, only the two ends.
    """
    with _lock:
        sender = _sender()
    sender.send(shortened(str(message), _MOST_CHARS))


class _Messages:
    """Sender of this process's messages."""

    def __init__(self) -> None:
        self._rank = int(os.environ.get("HOROVOD_RANK", "0"))
        self._events = EventSender(patience=_SEND_SECONDS)
        self._relay = Relay(self._deliver) if self._events.is_connected else None

    def send(self, message: str) -> None:
        if self._relay is not None and self._events.is_connected:
            self._relay.put("", [message])
        else:
            print(message, flush=True)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close(_CLOSE_SECONDS)
        self._events.close()

    def _deliver(self, messages: Sequence[tuple[str, str]]) -> None:
        self._events.send_all([RankMessage(self._rank, text.rstrip("\n")) for _, text in messages])


_lock = threading.Lock()


_current: _Messages | None = None


def _sender() -> _Messages:
    """Return the sender of this process's messages, which exists until the process ends."""
    global _current
    if _current is None:
        _current = _Messages()
        atexit.register(_current.close)
    return _current


def _forget() -> None:
    """Reset the sender in a forked child, which has no thread and must not use the connection."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
