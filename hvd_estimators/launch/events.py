"""Events from ranks to the driver while a job runs: progress, epochs, and lines of output.

They travel as messages of `hvd_estimators.launch.channel`: both ends prove that they know a secret,
which ranks get in their environment, so that nobody else's events are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from hvd_estimators.launch.channel import Channel, new_secret
from hvd_estimators.launch.listener import Listener, bound_socket

__all__ = [
    "EVENTS_VARIABLE",
    "Event",
    "EventSender",
    "Handler",
    "RankEpoch",
    "RankOutput",
    "RankProgress",
    "listening_address",
    "one_by_one",
    "print_output",
    "receive_events",
]

EVENTS_VARIABLE = "HVD_ESTIMATORS_EVENTS"
"""Environment variable that tells ranks where to send events: ``host:port:secret``."""

_CONNECT_SECONDS = 5.0
_DRAIN_SECONDS = 1.0
# Events may be days apart, and a rank may be stopped in the middle of one.
_IDLE_SECONDS = 30 * 86400.0
_SILENCE_SECONDS = 60.0

logger = logging.getLogger(__name__)


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
        The line with its end; of a long one the two ends only.
    """

    kind: ClassVar[str] = "output"

    rank: int
    line: str


Event = RankProgress | RankEpoch | RankOutput

Handler = Callable[[Event], None]
"""Called on the driver with one event at a time, from another thread."""

_KINDS: dict[str, type[RankProgress] | type[RankEpoch] | type[RankOutput]] = {
    kind.kind: kind for kind in (RankProgress, RankEpoch, RankOutput)
}


def _encoded(event: Event) -> dict[str, Any]:
    return {"kind": event.kind, **asdict(event)}


def _decoded(message: Mapping[str, Any]) -> Event:
    values = dict(message)
    return _KINDS[values.pop("kind")](**values)


def print_output(event: Event) -> None:
    """Print lines of output to standard error, with their rank; take no notice of other events."""
    if isinstance(event, RankOutput):
        # One write, lest the lines of several ranks run into each other.
        sys.stderr.write(f"[{event.rank}] {event.line}")


def one_by_one(handler: Handler) -> Handler:
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

    def serve(connection: socket.socket, proved: Callable[[], None]) -> None:
        channel = Channel.accept(connection, secret, _CONNECT_SECONDS)
        proved()
        while True:
            message, _ = channel.receive(_IDLE_SECONDS, _SILENCE_SECONDS)
            with lock:
                if ended.is_set():
                    return
                try:
                    handler(_decoded(message))
                except Exception:
                    logger.exception("An event of a rank could not be handled")

    host = host.strip("[]")  # as Spark writes an IPv6 address
    with Listener(listening_address(host), serve, is_ipv6=":" in host).listen() as listener:
        try:
            yield {EVENTS_VARIABLE: f"{host}:{listener.port}:{secret.hex()}"}
        finally:
            # Ranks that have ended have closed their connections: what is on its way is taken.
            listener.drain(_DRAIN_SECONDS)
            with lock:
                ended.set()


def listening_address(host: str) -> str:
    """Return the address to listen on: that of a host, or all where it is no address of ours."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        # A name may be another address for the ranks.
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        bound_socket(host).close()
    except OSError:
        return ""
    return host


class EventSender:
    """Sends events to the driver; does nothing where there is nobody to send to.

    Runs on the worker. Training never fails or waits because of an event: the first error ends
    the sending.
    """

    def __init__(self, target: str | None = None) -> None:
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
        if self._socket is None:
            return
        try:
            self._channel.send(_encoded(event))
        except OSError:
            self.close()

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
