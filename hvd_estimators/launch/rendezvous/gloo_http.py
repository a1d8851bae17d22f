"""A rank's proxy of the rendezvous on the loopback interface, and the address to listen on.

The rank's parent forwards requests over the job's authenticated connection. Horovod's C++ code
supports only plain HTTP. `hvd_estimators.launch.rendezvous.client.RankClient` uses a `Channel`. The
rank authenticates with a token from its environment, which other users of the machine cannot read.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

import psutil

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import LOOPBACK, Channel, Listener
from hvd_estimators.launch.rendezvous.client import (
    ADDRESS_VARIABLE,
    KEYS_PORT_VARIABLE,
    PROXY_ADDRESS_VARIABLE,
    PROXY_PORT_VARIABLE,
    TOKEN_VARIABLE,
    PeerLostError,
    RendezvousClient,
)

INTERFACE_VARIABLE = "HOROVOD_GLOO_IFACE"
"""Environment variable of Horovod: the network interface to use."""

TORCH_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable of torch: the network interface that its Gloo uses."""

NCCL_INTERFACE_VARIABLE = "NCCL_SOCKET_IFNAME"
"""Environment variable of NCCL: the network interfaces that it uses; ``=`` means an exact name."""

_MOST_BODY_BYTES = 16 * 2**20
_PATH = re.compile(r"/([^/]+)/([^/]+)")
# Kinds of requests of `RankClient`, and their scope, which Horovod's Gloo does not have.
_KEYS_KINDS = ("set", "get", "add", "delete")
_KEYS_SCOPE = "keys"
# The scope that connects all ranks. Horovod connects it first.
_GLOBAL_SCOPE = "global_"

_OK, _BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND, _UNAVAILABLE = 200, 400, 401, 404, 503


class GlooProxy:
    """Proxy for the rendezvous requests of one rank; used as a context manager.

    Parameters
    ----------
    client : RendezvousClient
        The client to which requests are forwarded.
    size : int
        Number of ranks of the job.
    """

    def __init__(self, client: RendezvousClient, size: int) -> None:
        self._client = client
        self.gloo_keys = GlooKeys(client, size)
        self.token = secrets.token_hex(32)
        self._listener = Listener(LOOPBACK, self._serve_horovod)
        self._keys_listener = Listener(LOOPBACK, self._serve_keys)

    def environment(self) -> dict[str, str]:
        """Return the environment variables with this server's address and token."""
        return {
            PROXY_ADDRESS_VARIABLE: LOOPBACK,
            PROXY_PORT_VARIABLE: str(self._listener.port),
            KEYS_PORT_VARIABLE: str(self._keys_listener.port),
            TOKEN_VARIABLE: self.token,
        }

    def __enter__(self) -> Self:
        self._listener.listen()
        self._keys_listener.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        self._keys_listener.close()

    def _serve_horovod(self, connection: socket.socket) -> None:
        server: Any = self
        _Handler(connection, None, server)

    def _serve_keys(self, connection: socket.socket) -> None:
        key = bytes.fromhex(self.token)
        channel = Channel.accept(connection, key, timeouts.GLOO_REQUEST)
        while True:
            message, body = channel.receive(timeouts.EVENT_IDLE)
            kind = message.pop("kind", None)
            if kind not in _KEYS_KINDS:
                raise ValueError(f"a request of the kind {kind!r}")
            answer, body = self._client.request(kind, body, **{**message, "scope": _KEYS_SCOPE})
            channel.send(answer, body)


class _Handler(BaseHTTPRequestHandler):
    """Answer to one request of Horovod."""

    protocol_version = "HTTP/1.1"
    timeout = timeouts.GLOO_REQUEST
    server: Any

    def answer(self) -> None:
        given = f"{self.headers.get('authorization')}"
        body = b""
        # Check the token before any data of the job is read or sent.
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            status = _UNAUTHORIZED
        elif (length := int(self.headers.get("content-length", 0))) > _MOST_BODY_BYTES:
            status = _BAD_REQUEST
            body = f"a value has {length} bytes; at most {_MOST_BODY_BYTES} fit".encode()
        else:
            status, body = self._reply(self.rfile.read(length))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_DELETE = do_POST = answer

    def _reply(self, content: bytes) -> tuple[int, bytes]:
        named = _PATH.fullmatch(self.path)
        if named is None or named[1] == _KEYS_SCOPE or self.command == "POST":
            return _BAD_REQUEST, b""
        try:
            keys: GlooKeys = self.server.gloo_keys
            return keys.request(self.command, named[1], named[2], content)
        except PeerLostError:
            return _UNAVAILABLE, b""

    def send_error(self, *args: Any) -> None:
        """Close the connection without a word, because only strangers send anything else."""
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def listening_environment(address: str) -> dict[str, str]:
    """Return the variables with the address, and its interface, on which a rank listens."""
    # The first is for Horovod built by `hvd-estimators build-horovod`, the second for other builds.
    # The third is for torch's Gloo, which has no variable for an address.
    found = (name for name, of in psutil.net_if_addrs().items() for e in of if e.address == address)
    interface = next(found, "lo")
    return {
        ADDRESS_VARIABLE: address,
        INTERFACE_VARIABLE: interface,
        TORCH_INTERFACE_VARIABLE: interface,
        NCCL_INTERFACE_VARIABLE: f"={interface}",
    }


class GlooKeys:
    """Keys of one rank's Gloo: one request per scope fetches the values of all other ranks.

    In each scope, Gloo puts one value per rank: its addresses for the other ranks, in order, all of
    equal length (``gloo/rendezvous/context.cc`` in Horovod 0.28). Each rank then gets the values of
    all others, each twice, and reads only its own address in them. N ranks with one message per
    request would send 2 N^2 messages, and 272 N^3 bytes. So only the own address is fetched of each
    value, and the rest of the value that Gloo gets is zero.

    Gloo also puts the ranks' host names, in keys that are not numbers, and does not use them over
    TCP. They are not sent.

    Parameters
    ----------
    client : RendezvousClient
        The client to which requests are forwarded.
    size : int
        Number of ranks of the job.
    """

    def __init__(self, client: RendezvousClient, size: int) -> None:
        self._client = client
        self._size = size
        self._address_bytes: int | None = None
        self._own_keys: dict[str, tuple[int, int]] = {}
        self._addresses: dict[str, bytes] = {}

    def request(self, method: str, scope: str, key: str, content: bytes) -> tuple[int, bytes]:
        """Answer a request with a status and bytes.

        Raises
        ------
        PeerLostError
            If the rendezvous cannot be reached.
        """
        if not key.isdecimal():
            return (_NOT_FOUND if method == "GET" else _OK), b""
        if method == "GET":
            return self._get(scope, int(key))
        if method == "PUT":
            self._own_keys[scope] = int(key), len(content)
            if scope == _GLOBAL_SCOPE and self._size > 1:
                self._address_bytes = len(content) // (self._size - 1)
        self._addresses.pop(scope, None)
        kind = "set" if method == "PUT" else "delete"
        answer, body = self._client.request(kind, content, scope=scope, key=key)
        return int(answer["status"]), body

    def _get(self, scope: str, key: int) -> tuple[int, bytes]:
        own, num_bytes = self._own_keys.get(scope, (-1, 0))
        length = self._address_bytes
        if not length or not num_bytes or num_bytes % length or key == own:
            # This is not the Gloo described above.
            answer, value = self._client.request("get", scope=scope, keys=[str(key)])
            return int(answer["status"]), value
        addresses = self._addresses.get(scope)
        if addresses is None:
            count = num_bytes // length + 1
            answer, addresses = self._client.request(
                "get_parts", scope=scope, key=str(own), count=count
            )
            if answer["status"] != _OK:
                return int(answer["status"]), b""
            self._addresses[scope] = addresses
        place = length * (key - (key > own))
        address = addresses[place : place + length]
        start = length * (own - (own > key))
        return _OK, bytes(start) + address + bytes(num_bytes - start - length)
