"""Gloo's side of a rank: an HTTP rendezvous on the loopback interface, and the listening address.

Horovod's C++ code supports only plain HTTP. It sends its requests to this server in the rank's
parent, which forwards them over the job's authenticated connection. So does
`hvd_estimators.launch.rendezvous.client.RankClient`. The rank authenticates with a token from
its environment, which other users of the machine cannot read.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
import time
from typing import Self

import psutil

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import (
    LOOPBACK,
    Listener,
    receive_exactly,
    receive_some,
)
from hvd_estimators.launch.rendezvous.client import (
    ADDRESS_VARIABLE,
    KEYS_SCOPE,
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

_MOST_HEAD_BYTES = 16 * 2**10
_MOST_BODY_BYTES = 16 * 2**20
_END_OF_HEAD = b"\r\n\r\n"
_METHODS = ("PUT", "GET", "DELETE")
_PATH = re.compile(r"/([^/]+)/([^/]+)")
# Kinds of requests of `RankClient`, whose keys do not mix with the keys of Horovod's Gloo.
_KEYS_KINDS = ("set", "get", "add", "append", "compare_set", "wait", "delete", "count")
# The scope that connects all ranks. Horovod connects it first.
_GLOBAL_SCOPE = "global_"

_OK, _BAD_REQUEST, _UNAUTHORIZED, _NOT_FOUND, _UNAVAILABLE = 200, 400, 401, 404, 503


class GlooProxy:
    """HTTP proxy for the rendezvous requests of one rank; used as a context manager.

    Parameters
    ----------
    client : RendezvousClient
        The client to which requests are forwarded.
    size : int
        Number of ranks of the job.
    """

    def __init__(self, client: RendezvousClient, size: int) -> None:
        self._client = client
        self._gloo_keys = GlooKeys(client, size)
        self._token = secrets.token_hex(32)
        self._listener = Listener(LOOPBACK, self._serve)

    def environment(self) -> dict[str, str]:
        """Return the environment variables with this server's address and token."""
        return {
            PROXY_ADDRESS_VARIABLE: LOOPBACK,
            PROXY_PORT_VARIABLE: str(self._listener.port),
            TOKEN_VARIABLE: self._token,
        }

    def __enter__(self) -> Self:
        self._listener.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + timeouts.GLOO_REQUEST
        method, path, headers, begun = _head(connection, deadline)
        given = headers.get("authorization", "")
        body = b""
        # Check the token before any data of the job is read or sent.
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            status = _UNAUTHORIZED
        else:
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > _MOST_BODY_BYTES:
                status = _BAD_REQUEST
                body = f"a value has {length} bytes; at most {_MOST_BODY_BYTES} fit".encode()
            else:
                rest = receive_exactly(connection, max(int(length) - len(begun), 0), deadline)
                try:
                    status, body = self._reply(method, path, begun + rest)
                except PeerLostError:
                    status = _UNAVAILABLE
        connection.settimeout(timeouts.GLOO_REQUEST)
        head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)

    def _answer_keys(self, kind: str, content: bytes) -> tuple[int, bytes]:
        """Answer a request of `RankClient`: JSON values and bytes, separated by a line break."""
        if kind not in _KEYS_KINDS:
            return _BAD_REQUEST, b""
        values, _, body = content.partition(b"\n")
        arguments = {**json.loads(values), "scope": KEYS_SCOPE}
        answer, body = self._client.request(kind, body, **arguments)
        return _OK, json.dumps(answer).encode() + b"\n" + body

    def _reply(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        if method == "POST" and path.startswith(f"/{KEYS_SCOPE}/"):
            return self._answer_keys(path.removeprefix(f"/{KEYS_SCOPE}/"), content)
        named = _PATH.fullmatch(path)
        if named is None or method not in _METHODS:
            return _BAD_REQUEST, b""
        scope, key = named.groups()
        if scope == KEYS_SCOPE:
            return _BAD_REQUEST, b""
        return self._gloo_keys.request(method, scope, key, content)


def _head(connection: socket.socket, deadline: float) -> tuple[str, str, dict[str, str], bytes]:
    """Receive a request's head and perhaps more.

    Returns
    -------
    (str, str, dict, bytes)
        The method, the path, the headers with names in lower case, and the bytes after the head.
    """
    received = bytearray()
    while (end := received.find(_END_OF_HEAD)) < 0:
        if len(received) > _MOST_HEAD_BYTES:
            raise ConnectionAbortedError("A request's head is too long.")
        received += receive_some(connection, _MOST_HEAD_BYTES, deadline)
    first, *lines = received[:end].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3:
        raise ConnectionAbortedError("A request is not HTTP.")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return words[0], words[1], headers, bytes(received[end + len(_END_OF_HEAD) :])


def listening_environment(address: str) -> dict[str, str]:
    """Return the variables with the address, and its interface, on which a rank listens."""
    # The first is for Horovod built by `hvd-estimators build-horovod`, the second for other builds.
    # The third is for torch's Gloo, which has no variable for an address.
    interface = _interface_of(address)
    return {
        ADDRESS_VARIABLE: address,
        INTERFACE_VARIABLE: interface,
        TORCH_INTERFACE_VARIABLE: interface,
        NCCL_INTERFACE_VARIABLE: f"={interface}",
    }


def _interface_of(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo"


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
