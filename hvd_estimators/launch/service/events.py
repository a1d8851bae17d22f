"""Events from ranks to the driver's service: progress, epochs, messages, output and stages."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, get_args

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rank.graceful_stop import AwaitedRanks
from hvd_estimators.launch.rank.output import shortened
from hvd_estimators.launch.rendezvous.channel import Channel
from hvd_estimators.launch.service.server import (
    SERVICE_VARIABLE,
    DriverService,
    RequestHandler,
    connect_to_driver,
)


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
    rates : mapping of str to float
        Learning rates, and rows per second of all ranks, for loggers.
    """

    kind: ClassVar[str] = "epoch"

    rank: int
    epoch: int
    rows: Sequence[Sequence[Any]]
    rates: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankOutput:
    """Line of a rank's output.

    Attributes
    ----------
    rank : int
        The rank.
    line : str
        The line with its line ending. A line of more than 8192 characters is divided. If lines
        were dropped because they were not read for long, a line reports how many.
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
        A `hvd_estimators.launch.stage.Stage`.
    """

    kind: ClassVar[str] = "stage"

    rank: int
    task: int
    host: str
    stage: int


@dataclass(frozen=True)
class LaunchStart:
    """Start of a launch, from the driver itself.

    Attributes
    ----------
    num_ranks : int
        Number of ranks.
    """

    kind: ClassVar[str] = "launch"

    num_ranks: int


Event = RankProgress | RankEpoch | RankOutput | RankMessage | RankStage | LaunchStart


Handler = Callable[[Event], None]
"""Called on the driver with one event at a time, from another thread."""

_KINDS: dict[str, Callable[..., Event]] = {kind.kind: kind for kind in get_args(Event)}


def encoded(event: Event) -> dict[str, Any]:
    """Return an event as a message."""
    return {"kind": event.kind, **asdict(event)}


def decoded(message: Mapping[str, Any]) -> Event:
    """Return the event in a message."""
    values = dict(message)
    return _KINDS[values.pop("kind")](**values)


# The kind of the request that opens a connection for events, and of messages on it that are not
# events.
_KIND, _SEVERAL, _AWAITED = "events", "several", "awaited"
# The kind of the only message from the driver.
_STOP = "stop"

logger = logging.getLogger(__name__)


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
def receive_events(
    service: DriverService, handler: Handler, requests: Mapping[str, RequestHandler] | None = None
) -> Iterator[Callable[[], None]]:
    """Call a handler for every event until the block ends. Runs on the driver.

    If an error or an interrupt ends the block, waits for ranks that have requested time. Yields a
    function that asks these ranks to save their state and to end, also those that request time
    later.

    Parameters
    ----------
    service : DriverService
        The launch's service.
    handler : callable
        Called with one event at a time, from another thread.
    requests : mapping, optional
        Handlers of other messages on the same connections, by their kinds.
    """
    lock = threading.Lock()
    finished = threading.Event()
    awaited = AwaitedRanks()
    stopping = threading.Lock()
    is_asked = False
    handled = 0

    def handle(message: Mapping[str, Any]) -> None:
        nonlocal handled
        for event in message["events"] if message.get("kind") == _SEVERAL else [message]:
            with lock:
                if finished.is_set():
                    return
                handled += 1
                try:
                    handler(decoded(event))
                except Exception:
                    logger.exception("An event of a rank could not be handled")

    def receive(channel: Channel, *request: Any) -> None:
        try:
            while not finished.is_set():
                message, body = channel.receive(timeouts.EVENT_IDLE, timeouts.EVENT_COMPLETE)
                kind = str(message.get("kind"))
                if requests is not None and kind in requests:
                    requests[kind](channel, message, body)
                elif kind == _AWAITED:
                    with stopping:
                        awaited.add(channel, message["seconds"])
                        if is_asked:
                            send_stop(channel)
                else:
                    handle(message)
        finally:
            awaited.discard(channel)

    def send_stop(channel: Channel) -> None:
        with contextlib.suppress(OSError):  # the rank has ended
            channel.send({"kind": _STOP})

    def ask_to_stop() -> None:
        nonlocal is_asked
        with stopping:
            is_asked = True
            for channel in awaited.all_keys():
                send_stop(channel)

    def drain() -> None:
        """Wait for pending events as long as some of them arrive."""
        deadline = time.monotonic() + timeouts.LAST_EVENTS
        before = -1
        while not service.drain(timeouts.EVENT_DRAIN):
            if handled == before:
                return  # a rank stays connected
            if time.monotonic() > deadline:
                logger.warning(
                    "The last output of the ranks is not shown, because it is read too slowly."
                )
                return
            before = handled

    service.add_handler(_KIND, receive)
    try:
        yield ask_to_stop
    except BaseException:
        awaited.wait()
        raise
    finally:
        # Ended ranks have closed their connections, so handle all pending events.
        drain()
        with lock:
            finished.set()


class EventSender:
    """Sender of events to the driver; does nothing if no receiver is configured.

    Runs in ranks and their tasks, in any thread. The first error ends the sending; it never ends
    the training. A task exchanges its facts on the same connection, see `ask`.

    Parameters
    ----------
    address : str, optional
        Address of the driver's service; empty for none. Default: the value of `SERVICE_VARIABLE`.
    patience : float
        Seconds that the driver may take for one event.
    """

    def __init__(self, address: str | None = None, patience: float = timeouts.EVENT_SEND) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        address = os.environ.get(SERVICE_VARIABLE) if address is None else address
        if not address:
            return
        try:
            self._channel = connect_to_driver(address, timeouts.EVENT_CONNECT)
        except (OSError, ValueError) as error:
            location = address.rpartition(":")[0]
            logger.info("The driver is not reached at %s (%s)", location, error)
        self._send({"kind": _KIND})

    @property
    def is_connected(self) -> bool:
        """True if events can reach the driver, as far as is known."""
        return self._channel is not None

    def send(self, event: Event) -> None:
        """Send one event."""
        self._send(encoded(event))

    def send_all(self, events: Sequence[Event]) -> None:
        """Send several events at once."""
        self._send({"kind": _SEVERAL, "events": [encoded(event) for event in events]})

    def ask(
        self, message: Mapping[str, Any], body: bytes, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return its answer within a time limit.

        Raises
        ------
        OSError
            If there is no answer. The connection is closed then.
        """
        channel = self._channel
        if channel is None:
            raise ConnectionError("The driver is not connected.")
        try:
            with self._lock:
                channel.send(message, body, self._patience)
                return channel.receive(seconds, timeouts.EXCHANGE_ANSWER)
        except OSError:
            self.close()
            raise

    def ask_to_wait(self, seconds: float) -> None:
        """Ask the driver to wait for this sender to close if the driver is interrupted.

        The driver waits for ``seconds`` at most. Called by ranks that save their state when they
        are asked to end.
        """
        self._send({"kind": _AWAITED, "seconds": seconds})

    def when_asked_to_stop(self, stop: Callable[[], object]) -> None:
        """Call a function, in another thread, if the driver asks this rank to save and to end."""
        channel = self._channel
        if channel is None:
            return

        def receive() -> None:
            with contextlib.suppress(OSError):  # closed
                message, _ = channel.receive(timeouts.EVENT_IDLE, timeouts.EVENT_COMPLETE)
                if message.get("kind") == _STOP:
                    stop()

        threading.Thread(target=receive, name="hvd_estimators stop", daemon=True).start()

    def _send(self, message: Mapping[str, Any]) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            with self._lock:
                channel.send(message, seconds=self._patience)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the connection, which also stops another thread that is sending."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


_MAX_MESSAGE_CHARS = 8192


def log_to_driver(message: object) -> None:
    """Print a line on the driver's standard output while the ranks run. Called by a rank.

    Replaces ``sparkdl.horovod.log_to_driver``. If the driver does not read a message within five
    seconds, this and further messages are lost or printed here. So are messages without a receiver,
    as in a program without ranks.

    Parameters
    ----------
    message : object
        Its text is sent; of a text with more than 8192 characters, only the two ends.
    """
    global _current
    text = shortened(str(message), _MAX_MESSAGE_CHARS)
    with _lock:
        if _current is None:
            _current = EventSender()
            atexit.register(_current.close)
        sender = _current
    if sender.is_connected:
        sender.send(RankMessage(int(os.environ.get("HOROVOD_RANK", "0")), text.rstrip("\n")))
    else:
        print(text, flush=True)


_lock = threading.Lock()
_current: EventSender | None = None


def _forget() -> None:
    """Reset the sender in a forked child, which must not use the connection."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
