"""Messages of ranks to the driver. Runs in the ranks."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence

from hvd_estimators.launch.events.stream import EventSender, RankMessage
from hvd_estimators.launch.rank.output import shortened
from hvd_estimators.launch.rank.relay import Relay

__all__ = ["log_to_driver"]

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
