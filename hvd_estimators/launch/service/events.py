"""Events from ranks to the driver: progress, epochs, messages and output.

They travel as messages of `hvd_estimators.launch.rendezvous.channel`: both ends prove that they
know a secret, which ranks get in their environment, so that nobody else's events are taken.
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
    "decoded",
    "encoded",
    "log_to_driver",
    "receive_events",
    "serialized",
]


@dataclass(frozen=True)
class RankProgress:
    """How far a rank has come; rank 0 tells it for all.

    Attributes
    ----------
    rank : int
        Who tells it.
    epoch : int
        The current epoch, from 0.
    epochs : int
        Epochs of the whole run.
    step : int
        Steps of the epoch that are done.
    steps : int
        Steps of an epoch.
    rows_per_second : float
        Rows of all ranks in a second, since the epoch began.
    means : mapping of str to float
        What was measured, in the mean over the epoch so far.
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
    """What was measured in an epoch that is over; rank 0 tells it for all.

    Attributes
    ----------
    rank : int
        Who tells it.
    epoch : int
        The epoch, from 0.
    rows : sequence of (str, str, float)
        Stage (``"train"`` or ``"validation"``), name and value of each number.
    """

    kind: ClassVar[str] = "epoch"

    rank: int
    epoch: int
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class RankOutput:
    """A line that a rank has printed.

    Attributes
    ----------
    rank : int
        The rank.
    line : str
        The line with its end; of a long one the two ends only. Where lines have been left out,
        because nobody took them for long, one says how many.
    stream : str
        ``"stdout"`` or ``"stderr"``; empty where the two are not told apart.
    time : float
        When it came to the driver, in seconds since the epoch; 0 where that is not to be shown.
    """

    kind: ClassVar[str] = "output"

    rank: int
    line: str
    stream: str = ""
    time: float = 0.0

    def text(self) -> str:
        """Return the line as it is shown: as ``horovod.spark.run`` does if its stream is known."""
        when = time.asctime(time.localtime(self.time)) if self.time else ""
        between = f"<{self.stream}>:" if self.stream else " "
        return f"{when}[{self.rank}]{between}{self.line}"


@dataclass(frozen=True)
class RankMessage:
    """A message of a rank to the driver, see `hvd_estimators.log_to_driver`.

    Attributes
    ----------
    rank : int
        Who sends it.
    message : str
        The message; of a long one the two ends only.
    """

    kind: ClassVar[str] = "message"

    rank: int
    message: str


Event = RankProgress | RankEpoch | RankOutput | RankMessage


Handler = Callable[[Event], None]


"""Called on the driver with one event at a time, from another thread."""


_KINDS: dict[str, Callable[..., Event]] = {
    kind.kind: kind for kind in (RankProgress, RankEpoch, RankOutput, RankMessage)
}


def encoded(event: Event) -> dict[str, Any]:
    """Return an event as it travels."""
    return {"kind": event.kind, **asdict(event)}


def decoded(message: Mapping[str, Any]) -> Event:
    """Return the event that a message tells of."""
    values = dict(message)
    return _KINDS[values.pop("kind")](**values)


EVENTS_VARIABLE = "HVD_ESTIMATORS_EVENTS"


"""Environment variable that tells ranks where to send events: ``host:port:secret``."""


_CONNECT_SECONDS = 5.0


_DRAIN_SECONDS = 1.0


# While events still come: of what ranks have sent, this much of the handler's time is waited for.
_LAST_EVENTS_SECONDS = 60.0


# Events may be days apart, and a rank may be stopped in the middle of one.
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

    Where an error or an interrupt ends it, ranks that have asked for time are waited for.

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
        """Wait for what is on its way, for as long as some of it comes."""
        deadline = time.monotonic() + _LAST_EVENTS_SECONDS
        before = -1
        while not listener.drain(_DRAIN_SECONDS):
            if handled == before:
                return  # a rank that stays connected
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
            # Ranks that have ended have closed their connections: what is on its way is taken.
            drain(listener)
            with lock:
                ended.set()


class EventSender:
    """Sends events to the driver; does nothing where there is nobody to send to.

    Runs on the worker. Training never fails because of an event: the first error ends the sending.

    Parameters
    ----------
    target : str, optional
        Where to send them. Default: what the environment says.
    patience : float
        Seconds that the driver may take for one.
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
        """Whether events are on their way to the driver, as far as is known."""
        return self._socket is not None

    def send(self, event: Event) -> None:
        """Send one event."""
        self._send(encoded(event))

    def send_all(self, events: Sequence[Event]) -> None:
        """Send some events at once."""
        self._send({"kind": _SEVERAL, "events": [encoded(event) for event in events]})

    def ask_to_wait(self, seconds: float) -> None:
        """Have the driver wait, when it is interrupted, until this is closed; for so long at most.

        To be told by ranks that save something when they are asked to end.
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
        """End the connection; another thread that is sending stops that."""
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


_MOST_CHARS = 8192


# A driver may be slow, as a laptop that is asleep.
_SEND_SECONDS = 3600.0


_CLOSE_SECONDS = 5.0


def log_to_driver(message: object) -> None:
    """Print a line on the driver's standard output while the ranks run. Called by a rank.

    Takes the place of ``sparkdl.horovod.log_to_driver``. Training does not wait for the driver:
    where it takes messages too slowly some are left out, and a line says how many. Where nobody
    listens, as in a program without ranks, the message is printed here.

    Parameters
    ----------
    message : object
        Its text is sent; of one of more than 8192 characters the two ends.
    """
    with _lock:
        sender = _sender()
    sender.send(shortened(str(message), _MOST_CHARS))


class _Messages:
    """Sends this process's messages."""

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
    """Return what sends this process's messages, and does so until it ends."""
    global _current
    if _current is None:
        _current = _Messages()
        atexit.register(_current.close)
    return _current


def _forget() -> None:
    """Begin anew in a child, which has neither the thread nor a right to the connection."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
