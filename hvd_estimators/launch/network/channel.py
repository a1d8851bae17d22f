"""Messages over TCP between the tasks of a job, each with proof that it belongs to the job.

Both ends know a secret of the job. A connection begins with a random number from each end, and with
a proof from each end, made from both numbers, that it knows the secret. The keys of the connection
follow from the secret and these numbers, so that a recording of one connection is useless on
another one. After that a message is its length, its bytes, and an HMAC-SHA256 over its place in the
connection, its length and its bytes: messages that were changed, cut, repeated or put in another
order end the connection. Messages are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

__all__ = [
    "RANKS_KEY_VARIABLE",
    "SECRET_BYTES",
    "AuthenticationError",
    "Channel",
    "exchange_key",
    "new_secret",
    "ranks_key",
    "receive_exactly",
]

RANKS_KEY_VARIABLE = "HVD_ESTIMATORS_RANKS_KEY"
"""Environment variable of a rank: the key with which it proves that it belongs to the job."""

SECRET_BYTES = 32

_DIGEST = "sha256"
_NONCE_BYTES = 32
_TAG_BYTES = 32
# Gloo stores about 130 bytes for each pair of ranks.
_MAX_BYTES = 16 * 2**20


class AuthenticationError(ConnectionError):
    """The other end does not know the job's secret, or what it sent was changed on its way."""


def new_secret() -> bytes:
    """Return a secret for a job."""
    return secrets.token_bytes(SECRET_BYTES)


def ranks_key(secret: bytes) -> dict[str, str]:
    """Return the variable that lets a rank prove itself to other ranks of the job.

    Its value reveals nothing about the secret.
    """
    return {RANKS_KEY_VARIABLE: _mac(secret, b"ranks").hex()}


def exchange_key(secret: bytes) -> bytes:
    """Return the secret of another server of the job, where a proof for this one is worth nothing.

    It reveals nothing about the secret that it is made of.
    """
    return _mac(secret, b"exchange")


def receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive a number of bytes, however slowly they come, until a time of `time.monotonic`.

    Raises
    ------
    TimeoutError
        If they have not all come by then.
    ConnectionError
        If the connection ends before that.
    """
    received = bytearray()
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        part = connection.recv(min(count - len(received), 2**20))
        if not part:
            raise ConnectionResetError("The connection was closed.")
        received += part
    return bytes(received)


class Channel:
    """A connection on which both ends have proved that they know the secret.

    Made by `connect` and `accept`. A message is a flat dict of JSON's types, and bytes.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._connection = connection
        self._keys = {"send": sending, "receive": receiving}
        self._counts = {"send": 0, "receive": 0}

    @classmethod
    def connect(cls, connection: socket.socket, secret: bytes, seconds: float) -> Channel:
        """Authenticate on a connection that this end has opened.

        Raises
        ------
        AuthenticationError
            If the other end does not know the secret.
        OSError
            If the connection ends, or nothing comes in time.
        """
        deadline = time.monotonic() + seconds
        theirs = receive_exactly(connection, _NONCE_BYTES, deadline)
        ours = secrets.token_bytes(_NONCE_BYTES)
        nonces = theirs + ours
        connection.sendall(ours + _mac(secret, b"client", nonces))
        proof = receive_exactly(connection, _TAG_BYTES, deadline)
        if not hmac.compare_digest(proof, _mac(secret, b"server", nonces)):
            raise AuthenticationError("It does not know the job's secret.")
        to_server, to_client = _keys(secret, nonces)
        return cls(connection, to_server, to_client)

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes, seconds: float) -> Channel:
        """Authenticate on a connection that the other end has opened; raises as `connect` does."""
        deadline = time.monotonic() + seconds
        connection.settimeout(seconds)
        ours = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(ours)
        answer = receive_exactly(connection, _NONCE_BYTES + _TAG_BYTES, deadline)
        nonces = ours + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _mac(secret, b"client", nonces)):
            raise AuthenticationError("It does not know the job's secret.")
        connection.sendall(_mac(secret, b"server", nonces))
        to_server, to_client = _keys(secret, nonces)
        return cls(connection, to_client, to_server)

    def send(self, message: Mapping[str, Any], body: bytes = b"", seconds: float = 5.0) -> None:
        """Send a message."""
        payload = json.dumps(message).encode() + b"\n" + body
        length = struct.pack(">I", len(payload))
        self._connection.settimeout(seconds)
        self._connection.sendall(length + payload + self._tag("send", length, payload))

    def receive(self, idle: float, seconds: float = 5.0) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its bytes.

        Parameters
        ----------
        idle : float
            Seconds within which it has to begin.
        seconds : float
            Seconds after that within which it has to be complete.

        Raises
        ------
        AuthenticationError
            If it is not what the other end sent as its next message.
        OSError
            If the connection ends, or a time limit has passed.
        """
        first = receive_exactly(self._connection, 1, time.monotonic() + idle)
        deadline = time.monotonic() + seconds
        length = first + receive_exactly(self._connection, 3, deadline)
        count = struct.unpack(">I", length)[0]
        if count > _MAX_BYTES:
            raise AuthenticationError(f"A message of {count} bytes is none of this job's.")
        payload = receive_exactly(self._connection, count, deadline)
        tag = receive_exactly(self._connection, _TAG_BYTES, deadline)
        if not hmac.compare_digest(tag, self._tag("receive", length, payload)):
            raise AuthenticationError("A message was changed, or is not the one that is next.")
        message, _, body = payload.partition(b"\n")
        return json.loads(message), body

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _tag(self, direction: str, length: bytes, payload: bytes) -> bytes:
        number = struct.pack(">Q", self._counts[direction])
        self._counts[direction] += 1
        return _mac(self._keys[direction], number, length, payload)


def _keys(secret: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of a connection, to the server and to the client."""
    return _mac(secret, b"to server", nonces), _mac(secret, b"to client", nonces)


def _mac(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod=_DIGEST)
    for part in parts:
        code.update(part)
    return code.digest()
