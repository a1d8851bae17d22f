"""Clients of the rendezvous in rank 0's task. They resend messages until an answer or a time limit.

A rank's task has a `LocalRendezvousClient` or a `RemoteRendezvousClient`. The rank's process has a
`RankClient`, for keys that any program may use. Its requests go to the proxy in the rank's parent
(`hvd_estimators.launch.rendezvous.gloo_http`), which forwards them over the job's authenticated
connection. Imports no framework.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol, Self

from hvd_estimators.launch.rendezvous.channel import (
    AuthenticationError,
    Channel,
    MessageError,
    reading_message,
    retry,
)
from hvd_estimators.launch.rendezvous.server import INVALID, Answer, Failure, JobStore
from hvd_estimators.launch.timeouts import Patience

PROXY_ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
"""Environment variable of Horovod: the address of the rank's proxy."""

PROXY_PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
"""Environment variable of Horovod: the port of the rank's proxy."""

TOKEN_VARIABLE = "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"
"""Environment variable with a rank's bearer token for the rendezvous server."""

ADDRESS_VARIABLE = "HVD_ESTIMATORS_GLOO_ADDRESS"
"""Environment variable with the numeric address on which a rank's Gloo listens."""

KEYS_SCOPE = "keys"
"""First part of the path of each request of `RankClient`."""

# These messages change nothing, so repetitions need no number.
_READS = ("get", "get_all", "get_parts", "wait", "count", "alive")
# The port has no listener, or another program's.
_REFUSALS = (ConnectionRefusedError, ConnectionResetError, AuthenticationError)

_OK, _BAD_REQUEST = 200, 400


class PeerLostError(ConnectionError):
    """Error for an unreachable task of a rank, usually rank 0's.

    Attributes
    ----------
    failure : Failure
        The rank, its host, and how long it has been unreachable.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class RendezvousClient(Protocol):
    """Interface between a rank's task and the rendezvous."""

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Send a message and return its answer; raises `PeerLostError` and `MessageError`."""

    def failure(self) -> Failure | None:
        """Return the failure that ends the job, if any, without waiting."""

    def notify(self, kind: str, **values: Any) -> bool:
        """Send a message and return whether it was eventually answered."""


class LocalRendezvousClient:
    """Client for a store in the same process, for rank 0's task.

    It sends no heartbeats: the rank cannot be lost while this process answers the others, even if
    its start takes long.
    """

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        store.never_lost(rank)

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Return the store's answer to a message."""
        return self._store.handle({"kind": kind, "rank": self._rank, **values}, body)

    def failure(self) -> Failure | None:
        """Return the failure that ends the job, if any."""
        return self._store.failure()

    def notify(self, kind: str, **values: Any) -> bool:
        """Pass a message to the store; always return True."""
        self.request(kind, **values)
        return True


class RemoteRendezvousClient:
    """Client for the server in rank 0's task; used as a context manager.

    A separate thread sends a heartbeat once a second by default. The answers report failures.

    Parameters
    ----------
    endpoint : (str, int)
        The address and port of rank 0's task.
    secret : bytes
        The job's secret.
    rank : int
        This task's rank.
    server_host : str
        The machine of rank 0, for errors.
    patience : Patience
        Time limits.
    """

    def __init__(
        self,
        endpoint: tuple[str, int],
        secret: bytes,
        rank: int,
        server_host: str,
        patience: Patience | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._rank = rank
        self._server_host = server_host
        self._patience = patience or Patience()
        self._numbers = itertools.count()
        # Messages without an answer; the server keeps its answers to these and to newer ones.
        self._pending: set[int] = set()
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._heartbeat.join(self._patience.attempt)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def failure(self) -> Failure | None:
        """Return the failure that ends the job, if any, without waiting."""
        return self._failure

    def notify(self, kind: str, **values: Any) -> bool:
        """Send a message and return whether it was eventually answered."""
        try:
            self.request(kind, **values)
        except PeerLostError:
            return False
        return True

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Send a message until it is answered, and return the answer.

        Raises
        ------
        PeerLostError
            If connections were refused, or no answer arrived, for longer than the time limits.
        MessageError
            If the server's version of hvd_estimators does not know the message.
        """
        message = {"kind": kind, "rank": self._rank, **values}
        if kind in _READS:
            return self._send(message, body)
        with self._lock:
            number = next(self._numbers)
            self._pending.add(number)
            message |= {"number": number, "oldest": min(self._pending)}
        try:
            return self._send(message, body)
        finally:
            with self._lock:
                self._pending.discard(number)

    def _send(self, message: dict[str, Any], body: bytes) -> Answer:
        """Send a message until it is answered, and return the answer."""
        kind = message["kind"]
        # The server ends when all ranks are done, so a refusal of "done" counts as an answer.
        longest_refusal = 0.0 if kind == "done" else self._patience.refused
        refused = silent = started = 0.0

        def attempt() -> Answer:
            nonlocal started
            started = time.monotonic()
            return self._attempt(message, body)

        def is_final(error: OSError) -> bool:
            nonlocal refused, silent
            seconds = self._since(started) + self._patience.pause
            if isinstance(error, _REFUSALS):
                refused += seconds
            else:
                # An unstable network link may briefly refuse connections.
                refused, silent = 0.0, silent + refused + seconds
            if refused > longest_refusal:
                raise self._lost(f"has refused connections for {refused:.0f} s", error) from error
            if refused + silent >= self._patience.silence:
                raise self._lost(f"has not answered for {refused + silent:.0f} s", error) from error
            if self._ended.is_set() and kind == "alive":
                raise self._lost("has not answered the last heartbeat", error) from error
            return False

        answer, content = retry(attempt, is_final, self._patience.pause)
        if answer.get("status") == INVALID:
            raise MessageError(f"{self._server_host} rejects a message: {answer.get('error')}")
        return answer, content

    def _lost(self, why: str, error: OSError) -> PeerLostError:
        address, port = self._endpoint
        # str() of a system error begins with a number that does not help users.
        reason = error.strerror or str(error)
        why = f"{why} (at {address} port {port}: {reason})"
        return PeerLostError(Failure(0, self._server_host, why, lost=True))

    def _since(self, started: float) -> float:
        """Return the seconds since a moment, limited because this process may have been paused."""
        return min(time.monotonic() - started, self._patience.attempt + 1.0)

    def _attempt(self, message: dict[str, Any], body: bytes) -> Answer:
        try:
            channel, is_used = self._idle.get_nowait(), True
        except queue.Empty:
            channel = Channel.open(self._endpoint, self._secret, self._patience.attempt)
            is_used = False
        try:
            channel.send(message, body, self._patience.attempt)
            reply = channel.receive(self._patience.attempt, self._patience.attempt)
        # Also on interrupts: an unread answer would be mistaken for the next message's answer.
        except BaseException as error:
            channel.close()
            # The server may have closed the idle connection: retry with a new one.
            if is_used and isinstance(error, ConnectionError):
                return self._attempt(message, body)
            raise
        self._idle.put(channel)
        return reply

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._patience.beat):
            try:
                reply, _ = self.request("alive")
                with reading_message(f"Rank 0 on {self._server_host}"):
                    failure = reply["failure"] and Failure(**reply["failure"])
            except PeerLostError as error:
                if not self._ended.is_set():
                    self._failure = error.failure
                return
            except MessageError as error:
                self._failure = Failure(self._rank, socket.gethostname(), f"failed: {error}")
                return
            if failure:
                self._failure = failure


class RankClient:
    """Client for the rank's proxy. Runs in the rank.

    Parameters
    ----------
    address : str
        The proxy's address.
    port : int
        The proxy's port.
    token : str
        The bearer token that the proxy expects.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._endpoint = address, port
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankClient | None:
        """Return the client for a rank's environment; None if another launcher started the rank."""
        if TOKEN_VARIABLE not in env:
            return None
        return cls(env[PROXY_ADDRESS_VARIABLE], int(env[PROXY_PORT_VARIABLE]), env[TOKEN_VARIABLE])

    def request(self, kind: str, body: bytes = b"", **values: Any) -> tuple[dict[str, Any], bytes]:
        """Send a message, and return the values and the bytes of its answer.

        Raises
        ------
        MessageError
            If the rendezvous does not know the message.
        ConnectionError
            If the task of rank 0 cannot be reached.
        """
        patience = Patience()
        # The proxy itself retries for this time.
        seconds = patience.silence + 2 * patience.attempt
        connection = http.client.HTTPConnection(*self._endpoint, timeout=seconds)
        try:
            head = json.dumps(values).encode()
            path = f"/{KEYS_SCOPE}/{kind}"
            connection.request("POST", path, head + b"\n" + body, self._headers)
            answer = connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"The rank's parent sent no answer: {error!r}.") from error
        finally:
            connection.close()
        if answer.status == _BAD_REQUEST and content:
            raise MessageError(content.decode(errors="replace"))
        if answer.status != _OK:
            raise ConnectionError(
                f"The rendezvous in the task of rank 0 cannot be reached (status {answer.status})."
            )
        head, _, content = content.partition(b"\n")
        return json.loads(head), content
