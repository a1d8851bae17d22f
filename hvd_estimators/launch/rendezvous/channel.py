"""Authenticated messages over TCP, and a listener for them.

Both ends know the job's secret. Each end first sends a random nonce and a proof that it knows the
secret, an HMAC over both nonces. The keys of the connection are derived from the secret and the
nonces, so that a recorded connection cannot be replayed on another one.

After this handshake each message consists of its length, its bytes and an HMAC-SHA256. The HMAC
covers the message's sequence number, its length and its bytes. A modified, truncated, repeated or
reordered message ends the connection. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from hvd_estimators.launch import timeouts

RANKS_KEY_VARIABLE = "HVD_ESTIMATORS_RANKS_KEY"
"""Environment variable of a rank: the key by which it proves that it belongs to the job."""

_SECRET_BYTES = 32
_DIGEST = "sha256"
_NONCE_BYTES = 32
_TAG_BYTES = 32
# For N ranks, torch's Gloo gets about 8 N^2 bytes at once, Horovod's about 130 N.
_MAX_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20


class AuthenticationError(ConnectionError):
    """Error for a peer that does not know the job's secret, or for a modified message."""


def new_secret() -> bytes:
    """Return a new random secret for a job."""
    return secrets.token_bytes(_SECRET_BYTES)


def ranks_key(secret: bytes) -> dict[str, str]:
    """Return the environment variable by which a rank authenticates to other ranks of the job.

    The value of the variable reveals nothing about the secret.
    """
    return {RANKS_KEY_VARIABLE: _mac(secret, b"ranks").hex()}


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive exactly the given number of bytes before a deadline of `time.monotonic`.

    Raises
    ------
    TimeoutError
        If the deadline passes before all bytes have arrived.
    ConnectionError
        If the connection ends before all bytes have arrived.
    """
    received = bytearray(count)
    _receive_into(connection, memoryview(received), deadline)
    return bytes(received)


def _receive_into(connection: socket.socket, target: memoryview, deadline: float) -> None:
    while target:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("The connection was closed.")
        target = target[count:]


class Channel:
    """A connection on which both ends have proved that they know the secret.

    Created by `open`, `connect` and `accept`; used as a context manager or closed. A message
    consists of a flat dict of JSON types and of bytes.

    Attributes
    ----------
    peer : str
        The address and port of the other end.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._connection = connection
        self._keys = {"send": sending, "receive": receiving}
        self._counts = {"send": 0, "receive": 0}
        self.peer = "a peer"
        with contextlib.suppress(OSError):  # it has disconnected
            self.peer = ":".join(str(part) for part in connection.getpeername()[:2])

    @classmethod
    def open(cls, endpoint: tuple[str, int], secret: bytes, seconds: float) -> Channel:
        """Open a connection to a host and port, and authenticate on it; raises as `connect` does.

        The limit applies to the connection and to the authentication separately.
        """
        connection = socket.create_connection(endpoint, seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls.connect(connection, secret, seconds)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def connect(cls, connection: socket.socket, secret: bytes, seconds: float) -> Channel:
        """Authenticate on a connection that this end has opened.

        Raises
        ------
        AuthenticationError
            If the other end does not know the secret.
        OSError
            If the connection ends, or the other end does not answer in time.
        """
        deadline = time.monotonic() + seconds
        server_nonce = receive_exactly(connection, _NONCE_BYTES, deadline)
        client_nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = server_nonce + client_nonce
        connection.sendall(client_nonce + _mac(secret, b"client", nonces))
        proof = receive_exactly(connection, _TAG_BYTES, deadline)
        if not hmac.compare_digest(proof, _mac(secret, b"server", nonces)):
            raise AuthenticationError("The peer does not know the job's secret.")
        to_server, to_client = _keys(secret, nonces)
        return cls(connection, to_server, to_client)

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, seconds: float) -> Channel:
        """Authenticate on a connection that the other end has opened; raises as `connect` does."""
        deadline = time.monotonic() + seconds
        connection.settimeout(seconds)
        server_nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(server_nonce)
        reply = receive_exactly(connection, _NONCE_BYTES + _TAG_BYTES, deadline)
        nonces = server_nonce + reply[:_NONCE_BYTES]
        if not hmac.compare_digest(reply[_NONCE_BYTES:], _mac(secret, b"client", nonces)):
            raise AuthenticationError("The peer does not know the job's secret.")
        connection.sendall(_mac(secret, b"server", nonces))
        to_server, to_client = _keys(secret, nonces)
        return cls(connection, to_client, to_server)

    def send(self, message: Mapping[str, Any], body: bytes = b"", seconds: float = 5.0) -> None:
        """Send a message, each MiB of it within the given seconds. A large body is not copied."""
        head = json.dumps(message).encode() + b"\n"
        length = struct.pack(">I", len(head) + len(body))
        tag = self._tag("send", length, head, body)
        parts: list[bytes | memoryview]
        if len(body) <= _CHUNK_BYTES:
            parts = [length + head + body + tag]  # one packet, if it is small
        else:
            parts = [length + head, *_chunks(memoryview(body)), tag]
        for part in parts:
            self._connection.settimeout(seconds)
            self._connection.sendall(part)

    def receive(
        self, idle: float, seconds: float = 5.0, most: int = _MAX_BYTES
    ) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its bytes.

        Parameters
        ----------
        idle : float
            Seconds within which the message must begin.
        seconds : float
            Seconds within which each MiB of a message that has begun must arrive.
        most : int
            Maximum size of the message.

        Raises
        ------
        AuthenticationError
            If the data is not the other end's next message.
        OSError
            If the connection ends, a time limit has passed, or the message is not a dict in JSON.
        """
        first = receive_exactly(self._connection, 1, time.monotonic() + idle)
        deadline = time.monotonic() + seconds
        length = first + receive_exactly(self._connection, 3, deadline)
        count = struct.unpack(">I", length)[0]
        if count > most:
            raise AuthenticationError(f"A message has {count} bytes, which is more than the limit.")
        received = bytearray(count)
        payload = memoryview(received)
        for part in _chunks(payload):
            _receive_into(self._connection, part, time.monotonic() + seconds)
        tag = receive_exactly(self._connection, _TAG_BYTES, time.monotonic() + seconds)
        if not hmac.compare_digest(tag, self._tag("receive", length, payload)):
            raise AuthenticationError("A message was changed, or is not the next one.")
        end = received.find(b"\n")
        try:
            return dict(json.loads(bytes(payload[:end]))), bytes(payload[end + 1 :])
        except (TypeError, ValueError) as error:
            raise ConnectionError(f"{self.peer} sent no message: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which also stops another thread that uses it."""
        _shut_down(self._connection)
        self._connection.close()

    def _tag(self, direction: str, *parts: bytes | memoryview) -> bytes:
        number = struct.pack(">Q", self._counts[direction])
        self._counts[direction] += 1
        return _mac(self._keys[direction], number, *parts)


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of a connection: for messages to the server and to the client."""
    return _mac(secret, b"to server", nonces), _mac(secret, b"to client", nonces)


def _chunks(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))


def _mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    code = hmac.new(key, digestmod=_DIGEST)
    for part in parts:
        code.update(part)
    return code.digest()


BACKLOG = 1024
"""Maximum number of connections that wait to be accepted."""

logger = logging.getLogger(__name__)


def bound_socket(address: str, *, is_shared: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to a free port of an address of this machine.

    Parameters
    ----------
    address : str
        A numeric address. An empty string means all addresses, of IPv6 and IPv4 where the machine
        has both.
    is_shared : bool
        Whether another process may listen on the port meanwhile.

    Raises
    ------
    OSError
        If this machine does not have the address, or if the address cannot be bound.
    """
    if not address:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return bound_socket("::", is_shared=is_shared)
        address = "0.0.0.0"
    is_ipv6 = ":" in address
    bound = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, 0))
    except OSError:
        bound.close()
        raise
    return bound


def _loopback() -> str:
    try:
        bound_socket("127.0.0.1").close()
    except OSError:
        return "::1"
    return "127.0.0.1"


LOOPBACK = _loopback()
"""Address of this machine's loopback interface, of IPv6 if it has no other one."""


class Listener:
    """TCP server that calls a function for each connection, in a separate thread.

    The constructor binds the port, but clients cannot connect before `listen`.

    Parameters
    ----------
    address : str
        The single address of this machine to listen on; an empty string means all addresses.
    serve : callable
        Called with the connection, which is closed afterwards. An error in this function ends the
        connection.

    Attributes
    ----------
    client_address : str
        ``host:port`` for clients.
    """

    def __init__(self, address: str, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._socket = bound_socket(address)
        self.address = address
        self.port = int(self._socket.getsockname()[1])
        self.client_address = f"{address}:{self.port}"
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @classmethod
    def at_host(cls, host: str, serve: Callable[[socket.socket], None]) -> Self:
        """Return a listener that clients reach at a host name or address.

        It listens on that address. If the host is a name, or not an address of this machine, it
        listens on all addresses: ranks may resolve a name to IPv4 or IPv6.
        """
        host = host.strip("[]")  # Spark writes IPv6 addresses in brackets
        listener = cls(_own_address(host), serve)
        listener.client_address = f"{host}:{listener.port}"
        return listener

    def listen(self) -> Self:
        """Start to accept connections, if not yet started."""
        if self._thread is not None:
            return self
        self._socket.listen(BACKLOG)
        self._waking, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def drain(self, seconds: float) -> bool:
        """Wait until all connections have ended, including those that are not accepted yet.

        Returns
        -------
        bool
            Whether all connections have ended within the given seconds.
        """
        deadline = time.monotonic() + seconds
        pending = select.poll()
        pending.register(self._socket, select.POLLIN)
        while True:
            with self._lock:
                if not (pending.poll(0) or self._connections):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(timeouts.LISTENER_DRAIN_POLL)

    def close(self) -> None:
        """Stop accepting connections, and end the existing ones."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            ending = [*self._connections]
        for connection in ending:
            _shut_down(connection)
        if self._thread is not None and not was_closed:
            os.close(self._wake)
            self._thread.join()
            os.close(self._waking)
        self._socket.close()

    def _accept(self) -> None:
        # Closing the socket, or shutting it down on macOS, would not wake up a blocked thread.
        self._socket.setblocking(False)
        poller = select.poll()
        for descriptor in (self._socket.fileno(), self._waking):
            poller.register(descriptor, select.POLLIN)
        while True:
            poller.poll()
            if self._closed:
                return
            try:
                with self._lock:
                    connection, _ = self._socket.accept()
                    connection.setblocking(True)
                    if self._closed:
                        connection.close()
                        return
                    self._connections.add(connection)
            except BlockingIOError:
                continue  # the client has disconnected
            except OSError:
                # For example, too many files are open.
                time.sleep(timeouts.LISTENER_PAUSE)
                continue
            try:
                threading.Thread(target=self._run, args=(connection,), daemon=True).start()
            except RuntimeError:  # too many threads run
                self._end(connection)
                time.sleep(timeouts.LISTENER_PAUSE)

    def _run(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(connection)
        except OSError:
            pass  # the other end has disconnected, or is not part of the job
        except Exception:
            logger.exception("A message could not be answered")
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


def _own_address(host: str) -> str:
    """Return the host's address if this machine has it; otherwise an empty string."""
    if host == "localhost":
        return LOOPBACK
    try:
        # Only numeric addresses: ranks may resolve a name to another address.
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
        bound_socket(host).close()
    except OSError:
        return ""
    return host


def _shut_down(connection: socket.socket) -> None:
    """Shut down a connection that another thread reads from."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
