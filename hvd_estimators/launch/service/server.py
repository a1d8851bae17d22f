"""The driver's service: one authenticated server for what ranks gather, report and commit.

A launch has one service, with one port and one secret. The first message of a connection names the
kind of its request, and the handler of that kind answers on the connection. Handlers are in
`hvd_estimators.launch.service.exchange`, `events` and `elastic_state`, with their clients.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel, Listener, new_secret

SERVICE_VARIABLE = "HVD_ESTIMATORS_SERVICE"
"""Environment variable of a rank: the address of its launch's `DriverService`."""

RequestHandler = Callable[[Channel, Mapping[str, Any], bytes], None]
"""Called in a thread of the connection, with the first message and its bytes."""


class DriverService:
    """Server on the driver for the ranks of one launch; used as a context manager.

    Parameters
    ----------
    host : str
        The address at which ranks reach this machine.

    Attributes
    ----------
    address : str
        Address for `connect_to_driver`: ``host:port:secret``.
    """

    def __init__(self, host: str) -> None:
        self._secret = new_secret()
        self._handlers: dict[str, RequestHandler] = {}
        self._listener = Listener.at_host(host, self._serve)
        self.address = f"{self._listener.client_address}:{self._secret.hex()}"

    def environment(self) -> dict[str, str]:
        """Return the environment variables by which ranks find this service."""
        return {SERVICE_VARIABLE: self.address}

    def add_handler(self, kind: str, handler: RequestHandler) -> None:
        """Answer requests of a kind with a handler, which may return when the launch has ended."""
        self._handlers[kind] = handler

    def drain(self, seconds: float) -> bool:
        """Wait until all connections have ended; return whether they ended in time."""
        return self._listener.drain(seconds)

    def __enter__(self) -> Self:
        self._listener.listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel.accept(connection, self._secret, timeouts.SERVICE_CONNECT)
        message, body = channel.receive(timeouts.SERVICE_CONNECT, timeouts.SERVICE_CONNECT)
        self._handlers[message["kind"]](channel, message, body)


def connect_to_driver(address: str, seconds: float = timeouts.SERVICE_CONNECT) -> Channel:
    """Return a channel to a `DriverService`.

    Parameters
    ----------
    address : str
        Address of the service.
    seconds : float
        Limit for the connection, and for the proof that both ends know the secret.

    Raises
    ------
    OSError
        If the service cannot be reached.
    ValueError
        If the address is malformed.
    """
    host, port, secret = address.rsplit(":", 2)
    return Channel.open((host, int(port)), bytes.fromhex(secret), seconds)
