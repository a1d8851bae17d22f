"""Moto's S3 as a process that reads commands from standard input, and ends with its input.

``close`` stops listening and closes all connections. ``open`` listens again, with all objects
kept. Requests are written to a file, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import ThreadedWSGIServer


class Handler(MotoRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing: `main` logs requests."""

    def handle_expect_100(self) -> bool:
        """Leave the answer to werkzeug: clients mistake a second ``100 Continue`` for the last."""
        return True


class Server(ThreadedWSGIServer):
    daemon_threads = True

    def __init__(self, port: int, app: Any) -> None:
        self._connected: set[socket.socket] = set()
        super().__init__("127.0.0.1", port, app, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connected.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._connected.discard(request)
        super().close_request(request)

    def cut_off(self) -> None:
        """Stop listening and close all connections."""
        self.shutdown()
        self.server_close()
        for connection in list(self._connected):
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        """Stop listening; unlike the base class, wait for no thread."""
        self.socket.close()


def main(port: int, log: str) -> None:
    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        noted = {
            "method": environ["REQUEST_METHOD"],
            "path": environ["PATH_INFO"],
            "query": environ["QUERY_STRING"],
            "range": environ.get("HTTP_RANGE", ""),
        }
        with open(log, "a") as requests:
            requests.write(json.dumps(noted) + "\n")
        return moto(environ, start_response)

    def start() -> Server:
        server = Server(port, app)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    server = start()
    for line in sys.stdin:
        if line.strip() == "close":
            server.cut_off()
        else:
            server = start()
        print(line.strip(), "done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
