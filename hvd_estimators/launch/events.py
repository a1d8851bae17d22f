"""Events from ranks to the driver while a job runs: progress, and lines of output.

One JSON document per line over TCP. The first line is a secret that the ranks get in their
environment, so that nobody else's lines are taken.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["EVENTS_VARIABLE", "EventSender", "receive_events"]

EVENTS_VARIABLE = "HVD_ESTIMATORS_EVENTS"
"""Environment variable that tells ranks where to send events: ``host:port:secret``."""

_CONNECT_SECONDS = 5.0
_DRAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)

Event = Mapping[str, Any]


@contextlib.contextmanager
def receive_events(handler: Callable[[Event], None], host: str) -> Iterator[dict[str, str]]:
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
    secret = secrets.token_hex(16)
    lock = threading.Lock()
    connected: set[Any] = set()
    ended = threading.Event()

    class Server(socketserver.ThreadingTCPServer):
        def process_request(self, request: Any, client_address: Any) -> None:
            connected.add(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            connected.discard(request)

    class Connection(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            given = self.rfile.readline(256).strip()
            if not hmac.compare_digest(given, secret.encode()):
                return
            for line in self.rfile:
                with lock:
                    if ended.is_set():
                        return
                    try:
                        handler(json.loads(line))
                    except Exception:
                        logger.exception("An event of a rank could not be handled")

    host = host.strip("[]")  # as Spark writes an IPv6 address
    Server.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = Server((_listening_address(host), 0), Connection)
    server.daemon_threads = True
    # Connections end with their rank; one that does not must not hold up the driver.
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield {EVENTS_VARIABLE: f"{host}:{server.server_address[1]}:{secret}"}
    finally:
        server.shutdown()
        thread.join()
        # Ranks that have ended have closed their connections: what is still on its way is taken.
        server.timeout = 0
        for _ in range(server.request_queue_size + 1):
            server.handle_request()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while connected and time.monotonic() < deadline:
            time.sleep(0.01)
        with lock:
            ended.set()
        server.server_close()


def _listening_address(host: str) -> str:
    """Return the address to listen on: that of a host, or all where it is no address of ours."""
    if host == "localhost":
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        try:
            socket.inet_pton(family, host)  # a name may be another address for the ranks
            trial.bind((host, 0))
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
            self._socket.sendall(f"{secret}\n".encode())
        except OSError as error:
            logger.info(
                "No progress on the driver: cannot reach it at %s:%s (%s)", host, port, error
            )
            self.close()

    def send(self, **event: Any) -> None:
        """Send one event, whose values are anything that JSON knows."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(event).encode() + b"\n")
        except OSError:
            self.close()

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
