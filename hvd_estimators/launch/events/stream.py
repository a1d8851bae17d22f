"""Events from ranks to the driver while a job runs: progress, epochs, messages, lines of output.

They travel as messages of `hvd_estimators.launch.network.channel`: both ends prove that they know a
secret, which ranks get in their environment, so that nobody else's events are taken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hvd_estimators.launch.events.kinds import (
    Event,
    Handler,
    RankEpoch,
    RankMessage,
    RankOutput,
    RankProgress,
    decoded,
    encoded,
)
from hvd_estimators.launch.network.channel import Channel, new_secret
from hvd_estimators.launch.network.listener import Listener
from hvd_estimators.launch.rank.grace import AwaitedRanks

__all__ = [
    "EVENTS_VARIABLE",
    "Event",
    "EventSender",
    "Handler",
    "RankEpoch",
    "RankMessage",
    "RankOutput",
    "RankProgress",
    "one_by_one",
    "receive_events",
]

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
