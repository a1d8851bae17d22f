"""Proxy in front of the S3 server that simulates failing networks and services."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_PIECE_BYTES = 2**16
_ANSWERS = {
    "SlowDown": (503, "Please reduce your request rate."),
    "ExpiredToken": (400, "The provided token has expired."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "AccessDenied": (403, "Access Denied"),
}


@dataclass
class Fault:
    """Fault that affects some requests.

    Attributes
    ----------
    kind : str
        ``"cut"``: the connection is closed after half of the request's body. ``"cut answer"``: it
        is closed after half of the answer's body. ``"short answer"``: half of the answer's body is
        a complete answer, as from a faulty gateway. Otherwise the code of an S3 error to answer
        with, for example ``SlowDown``.
    matches : callable
        Returns whether a method and a path, with the query, are affected.
    after : int
        Number of matching requests that pass first.
    times : int or None
        Number of times that the fault happens; None: to each request from then on.
    happened : int
        Number of times that the fault has happened.
    """

    kind: str
    matches: Callable[[str, str], bool] = lambda method, path: True
    after: int = 0
    times: int | None = 1
    happened: int = 0

    def meets(self, method: str, path: str) -> bool:
        """Count a request, and return whether it must fail."""
        if not self.matches(method, path) or self.happened == self.times:
            return False
        if self.after:
            self.after -= 1
            return False
        self.happened += 1
        return True


@dataclass
class FaultProxy:
    """Proxy that forwards requests in threads of this process. Used as a context manager.

    Attributes
    ----------
    target : int
        Port of the server.
    faults : list of Fault
        Current faults; the first that matches a request applies.
    seen : list of (str, str)
        Method and path of all requests.
    """

    target: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> FaultProxy:
        self._lock = threading.Lock()
        self._port = 0
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """Return the proxy's URL, which never changes."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start to listen, or listen again after `stop`."""
        self._server = _Server(self._port, self)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening, and close all connections."""
        self._server.cut_off()

    def fault(self, kind: str, **settings: Any) -> Fault:
        """Add a fault, and return it."""
        fault = Fault(kind, **settings)
        self.faults.append(fault)
        return fault

    def meet(self, method: str, path: str) -> str:
        """Return the fault of a request; an empty string if the request is forwarded."""
        with self._lock:
            self.seen.append((method, path))
            return next((each.kind for each in self.faults if each.meets(method, path)), "")


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self._connected: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connected.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._connected.discard(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: clients close connections, too."""

    def cut_off(self) -> None:
        self.shutdown()
        self.socket.close()
        for connection in list(self._connected):
            _cut(connection)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _handle(self) -> None:
        kind = self.server.proxy.meet(self.command, self.path)
        if kind in _ANSWERS:
            for _ in self._body():
                pass
            self._answer_error(kind)
            return
        body = list(self._body(half=kind == "cut"))
        if kind == "cut":
            # Like S3, the server discards incomplete uploads.
            self._end()
            return
        self._pass_on(b"".join(body), kind)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _body(self, half: bool = False) -> Iterator[bytes]:
        """Yield the request's body, or half of it, in pieces."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
                if half:
                    return
            while self.rfile.readline().strip():
                pass
            return
        left = int(self.headers.get("Content-Length", 0)) // (2 if half else 1)
        while left > 0 and (piece := self.rfile.read(min(left, _PIECE_BYTES))):
            yield piece
            left -= len(piece)

    def _pass_on(self, body: bytes, kind: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.proxy.target, timeout=60)
        try:
            dropped = ("connection", "expect", "transfer-encoding", "content-length")
            headers = [(n, v) for n, v in self.headers.items() if n.lower() not in dropped]
            connection.putrequest(self.command, self.path, True, True)
            for name, value in headers:
                connection.putheader(name, value)
            if body or self.command in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content = answer.read()
            if kind == "short answer":
                content = content[: len(content) // 2]
            if self.command == "HEAD":
                length = answer.headers.get("Content-Length", "0")
            else:
                length = str(len(content))
            told = ("connection", "transfer-encoding", "content-length", "keep-alive")
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in told:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if kind == "cut answer":
                self.wfile.write(content[: len(content) // 2])
                self._end()
            else:
                self.wfile.write(content)
        finally:
            connection.close()

    def _answer_error(self, code: str) -> None:
        status, message = _ANSWERS[code]
        content = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        ).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _end(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        _cut(self.connection)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
