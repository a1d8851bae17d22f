"""Clients of the rendezvous in rank 0's task.

A rank's task has a `LocalRendezvousClient` or a `RemoteRendezvousClient`. The rank's process has a
`RankClient`, for keys that any program may use. Its requests go to the proxy in the rank's parent
(`hvd_estimators.launch.rendezvous.gloo_http`), which forwards them over the job's authenticated
connection. Imports no framework.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from hvd_estimators.launch.rendezvous.channel import LOOPBACK, AuthenticationError, Channel
from hvd_estimators.launch.rendezvous.server import Answer, Failure, JobStore
from hvd_estimators.launch.timeouts import Patience

PROXY_ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
"""Environment variable of Horovod: the address of the rank's proxy."""

PROXY_PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
"""Environment variable of Horovod: the port of the rank's proxy."""

TOKEN_VARIABLE = "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"
"""Environment variable with a rank's bearer token for the rendezvous server."""

ADDRESS_VARIABLE = "HVD_ESTIMATORS_GLOO_ADDRESS"
"""Environment variable with the numeric address on which a rank's Gloo listens."""

KEYS_PORT_VARIABLE = "HVD_ESTIMATORS_KEYS_PORT"
"""Environment variable with the port of the rank's proxy for `RankClient`."""

# The proxy itself waits for this time, and a little less.
_PROXY_SECONDS = Patience().silence + 10.0

# The port has no listener, or another program's.
_REFUSALS = (ConnectionRefusedError, ConnectionResetError, AuthenticationError)


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


class LocalRendezvousClient:
    """Client for a store in the same process, for rank 0's task. It sends no heartbeats."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store = store
        self._rank = rank

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
    """Client for the server in rank 0's task, on one connection; used as a context manager.

    Any thread may send a message. A separate thread sends a heartbeat once a second by default,
    whose answer reports failures. A connection that breaks counts as the loss of rank 0, because a
    relaunch covers it; TCP itself survives a network that is down for half a minute.

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
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._lost: PeerLostError | None = None
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._channel is not None:
            self._channel.close()
        self._heartbeat.join(self._patience.attempt)

    def failure(self) -> Failure | None:
        """Return the failure that ends the job, if any, without waiting."""
        return self._failure

    def notify(self, kind: str, **values: Any) -> bool:
        """Send a message and return whether it was answered."""
        try:
            self.request(kind, **values)
        except PeerLostError:
            return False
        return True

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Send a message and return its answer.

        Raises
        ------
        PeerLostError
            If there is no connection, it has ended, or no answer arrived within the time limits.
        """
        message = {"kind": kind, "rank": self._rank, **values}
        silence = self._patience.silence
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                if self._channel is None:
                    self._channel = self._connect()
                self._channel.send(message, body, silence)
                return self._channel.receive(silence, silence)
            except OSError as error:
                self._lost = self._loss(error)
                raise self._lost from error

    def _connect(self) -> Channel:
        """Connect as soon as rank 0's task listens, and the network is up."""
        started = time.monotonic()
        while True:
            try:
                return Channel.open(self._endpoint, self._secret, self._patience.attempt)
            except OSError as error:
                seconds = time.monotonic() - started
                is_refused = isinstance(error, _REFUSALS)
                if seconds > (self._patience.refused if is_refused else self._patience.silence):
                    what = "refused connections" if is_refused else "not answered"
                    raise self._loss(error, f"has {what} for {seconds:.0f} s") from error
            time.sleep(self._patience.pause)

    def _loss(self, error: OSError, why: str = "") -> PeerLostError:
        if isinstance(error, PeerLostError):
            return error
        if not why:
            is_silent = isinstance(error, TimeoutError)
            silence = f"has not answered for {self._patience.silence:.0f} s"
            why = silence if is_silent else "has closed its connection"
        address, port = self._endpoint
        # str() of a system error begins with a number that does not help users.
        reason = error.strerror or str(error)
        why = f"{why} (at {address} port {port}: {reason})"
        return PeerLostError(Failure(0, self._server_host, why, lost=True))

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._patience.beat):
            try:
                failure = self.request("alive")[0]["failure"]
            except PeerLostError as error:
                # If only rank 0's task has ended, the ranks may still save their state together.
                if self._channel is not None and not isinstance(error.__cause__, TimeoutError):
                    self._ended.wait(self._patience.silence)
                if not self._ended.is_set():
                    self._failure = error.failure
                return
            if failure:
                self._failure = Failure(**failure)


RendezvousClient = LocalRendezvousClient | RemoteRendezvousClient
"""Interface between a rank's task and the rendezvous."""


class RankClient:
    """Client for the rank's proxy, on one connection. Runs in the rank.

    Parameters
    ----------
    port : int
        The proxy's port.
    token : str
        The rank's token.
    """

    def __init__(self, port: int, token: str) -> None:
        self._lock = threading.Lock()
        self._channel = Channel.open((LOOPBACK, port), bytes.fromhex(token), _PROXY_SECONDS)

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> RankClient | None:
        """Return the client for a rank's environment; None if another launcher started the rank."""
        if TOKEN_VARIABLE not in env:
            return None
        return cls(int(env[KEYS_PORT_VARIABLE]), env[TOKEN_VARIABLE])

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Send a message, and return the values and the bytes of its answer.

        Raises
        ------
        ConnectionError
            If the task of rank 0 cannot be reached.
        """
        with self._lock:
            try:
                self._channel.send({"kind": kind, **values}, body)
                return self._channel.receive(_PROXY_SECONDS, _PROXY_SECONDS)
            except OSError as error:
                raise ConnectionError(
                    f"The rendezvous in the task of rank 0 does not answer: {error}"
                ) from error
