"""A TCP listener that drops connections which do not soon prove who they are."""

from __future__ import annotations

import collections
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

__all__ = ["BACKLOG", "Listener", "bound_socket"]

BACKLOG = 1024
"""How many connections wait to be taken."""

_MOST_STRANGERS = 256
_PAUSE_SECONDS = 0.05

logger = logging.getLogger(__name__)


def bound_socket(address: str, is_ipv6: bool | None = None) -> socket.socket:
    """Return a TCP socket with a free port of an address of this machine.

    Parameters
    ----------
    address : str
        A numeric address; an empty one means all.
    is_ipv6 : bool, optional
        Which addresses are meant by an empty one. Default: what the address is.

    Raises
    ------
    OSError
        If it is no address of this machine, or of a kind that cannot be bound.
    """
    is_ipv6 = ":" in address if is_ipv6 is None else is_ipv6
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind((address, 0))
    except OSError:
        bound.close()
        raise
    return bound


class Listener:
    """Calls a function for each connection, in a thread of its own, until it is closed.

    The port is taken at once, but nobody can connect before `listen`.

    Parameters
    ----------
    address : str
        The one address of this machine to listen on.
    serve : callable
        Called with the connection, which is closed afterwards, and with a function to call when the
        other end has proved who it is. At most 256 connections may be without proof: the oldest
        makes room for a new one. An error of a connection ends it.
    is_ipv6 : bool, optional
        Which kind of addresses an empty address means. Default: the address's own kind.

    Attributes
    ----------
    place : str
        ``host:port``: where others reach it.
    """

    def __init__(
        self,
        address: str,
        serve: Callable[[socket.socket, Callable[[], None]], None],
        is_ipv6: bool | None = None,
    ) -> None:
        self._serve = serve
        self._socket = bound_socket(address, is_ipv6)
        self.address = address
        self.port = int(self._socket.getsockname()[1])
        self.place = f"{address}:{self.port}"
        self._lock = threading.Lock()
        self._strangers: collections.OrderedDict[socket.socket, None] = collections.OrderedDict()
        self._friends: set[socket.socket] = set()
        self._taken: collections.deque[tuple[str, int]] = collections.deque(maxlen=_MOST_STRANGERS)
        self._thread: threading.Thread | None = None
        self._closed = False

    @classmethod
    def at_host(cls, host: str, serve: Callable[[socket.socket, Callable[[], None]], None]) -> Self:
        """Return one that others reach at a host's name or address.

        It listens on that address, and on all where it is none of this machine's.
        """
        host = host.strip("[]")  # as Spark writes an IPv6 address
        listener = cls(_own_address(host), serve, is_ipv6=":" in host)
        listener.place = f"{host}:{listener.port}"
        return listener

    def listen(self) -> Self:
        """Let others connect, unless they already can."""
        if self._thread is not None:
            return self
        self._socket.listen(BACKLOG)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def drain(self, seconds: float) -> bool:
        """Wait until all connections have ended, even those that are not accepted yet.

        Returns
        -------
        bool
            Whether they have, within so many seconds.
        """
        deadline = time.monotonic() + seconds
        # Connections are accepted in order: once this one is known, so are all before it.
        with contextlib.suppress(OSError):
            mine = socket.create_connection(self._socket.getsockname()[:2], seconds)
            known = mine.getsockname()[:2]
            mine.close()
            while known not in self._taken and time.monotonic() < deadline:
                time.sleep(_PAUSE_SECONDS / 5)
        while time.monotonic() < deadline:
            with self._lock:
                if not (self._strangers or self._friends):
                    return True
            time.sleep(_PAUSE_SECONDS / 5)
        return False

    def close(self) -> None:
        """Refuse new connections, and end those that there are."""
        with self._lock:
            self._closed = True
            ending = [*self._strangers, *self._friends]
        # This wakes up the accepting thread; closing does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in ending:
            _end(connection)
        if self._thread is not None:
            self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, place = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                # Too many open files, for example.
                time.sleep(_PAUSE_SECONDS)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._strangers[connection] = None
                self._taken.append(place[:2])
                crowd = len(self._strangers) > _MOST_STRANGERS
                oldest = next(iter(self._strangers)) if crowd else None
            if oldest is not None:
                _end(oldest)
            threading.Thread(target=self._run, args=(connection,), daemon=True).start()

    def _run(self, connection: socket.socket) -> None:
        def proved() -> None:
            with self._lock:
                if self._strangers.pop(connection, connection) is None:
                    self._friends.add(connection)

        try:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._serve(connection, proved)
        except Exception:
            logger.exception("A message could not be answered")
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._friends.discard(connection)
            connection.close()


def _own_address(host: str) -> str:
    """Return the address of a host, or nothing where it is no address of ours."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        # A name may be another address for the ranks.
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        bound_socket(host).close()
    except OSError:
        return ""
    return host


def _end(connection: socket.socket) -> None:
    """End a connection that another thread reads from."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
