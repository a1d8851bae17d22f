"""How a rank's task talks to rank 0's: a message is repeated until it is answered or given up."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from hvd_estimators.launch.rendezvous.channel import AuthenticationError, Channel
from hvd_estimators.launch.rendezvous.server import Answer, Failure, JobStore
from hvd_estimators.launch.timeouts import Patience

__all__ = ["LocalRendezvousClient", "PeerLostError", "RemoteRendezvousClient", "RendezvousClient"]

# Nobody listens there, or somebody else.
_REFUSALS = (ConnectionRefusedError, ConnectionResetError, AuthenticationError)


class PeerLostError(ConnectionError):
    """The task of a rank, mostly rank 0's, cannot be reached.

    Attributes
    ----------
    failure : Failure
        Of which rank, where, and for how long.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class RendezvousClient(Protocol):
    """What a rank's task knows of the others."""

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Send a message and return its answer; raises `PeerLostError`."""

    def failure(self) -> Failure | None:
        """Return why the job cannot go on, if so; without waiting."""

    def notify(self, kind: str, **values: Any) -> bool:
        """Send a message and return whether it was answered in the end."""


class LocalRendezvousClient:
    """The link of a task to a store in its own process."""

    def __init__(self, store: JobStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def request(self, kind: str, body: bytes = b"", **values: Any) -> Answer:
        """Have a message answered."""
        return self._store.handle({"kind": kind, "rank": self._rank, **values}, body)

    def failure(self) -> Failure | None:
        """Return why the job cannot go on, if so."""
        self.request("alive")
        return self._store.failure()

    def notify(self, kind: str, **values: Any) -> bool:
        """Have a message answered, which it always is."""
        self.request(kind, **values)
        return True


class RemoteRendezvousClient:
    """The link of a task to the server in rank 0's task; used as a context manager.

    Says once a second that the task is alive, from a thread of its own, and so hears of failures.

    Parameters
    ----------
    endpoint : (str, int)
        The address and port at which rank 0's task is reached.
    secret : bytes
        The job's secret.
    rank : int
        This task's rank.
    server_host : str
        The machine of rank 0, for errors.
    patience : Patience
        How long to wait.
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
        self._idle: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._beating.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._beating.join(self._patience.attempt)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    def failure(self) -> Failure | None:
        """Return why the job cannot go on, if so; without waiting."""
        return self._failure

    def notify(self, kind: str, **values: Any) -> bool:
        """Send a message and return whether it was answered in the end."""
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
            If connections were refused, or nothing came back, for as long as the patience lasts.
        """
        message = {"kind": kind, "rank": self._rank, **values}
        if kind not in ("get", "alive"):
            message["number"] = next(self._numbers)
        # The server ends when all are done, so that a refusal then is as good as an answer.
        longest_refusal = 0.0 if kind == "done" else self._patience.refused
        refused = silent = 0.0
        while True:
            started = time.monotonic()
            try:
                return self._attempt(message, body)
            except OSError as error:
                cause = error
            seconds = self._since(started) + self._patience.pause
            if isinstance(cause, _REFUSALS):
                refused += seconds
            else:
                # A link that goes down and up may refuse for a moment.
                refused, silent = 0.0, silent + refused + seconds
            if refused > longest_refusal:
                raise self._lost(f"has refused connections for {refused:.0f} s", cause) from cause
            if refused + silent >= self._patience.silence:
                raise self._lost(f"has not answered for {refused + silent:.0f} s", cause) from cause
            if self._ended.is_set() and kind == "alive":
                raise self._lost("is not asked any more", cause) from cause
            time.sleep(self._patience.pause)

    def _lost(self, why: str, cause: OSError) -> PeerLostError:
        address, port = self._endpoint
        # What the system says begins with a number that tells users nothing.
        said = cause.strerror or str(cause)
        why = f"{why} (at {address} port {port}: {said})"
        return PeerLostError(Failure(0, self._server_host, why, lost=True))

    def _since(self, started: float) -> float:
        """Return the seconds since a moment; what is longer was a pause of this process."""
        return min(time.monotonic() - started, self._patience.attempt + 1.0)

    def _attempt(self, message: dict[str, Any], body: bytes) -> Answer:
        try:
            channel, is_used = self._idle.get_nowait(), True
        except queue.Empty:
            channel, is_used = self._open(), False
        try:
            channel.send(message, body, self._patience.attempt)
            answer = channel.receive(self._patience.attempt, self._patience.attempt)
        # Of an interrupt, too: an answer that was not taken would be taken for the next one's.
        except BaseException as error:
            channel.close()
            # The server may have closed it meanwhile: a new one tells.
            if is_used and isinstance(error, ConnectionError):
                return self._attempt(message, body)
            raise
        self._idle.put(channel)
        return answer

    def _open(self) -> Channel:
        connection = socket.create_connection(self._endpoint, self._patience.attempt)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Channel.connect(connection, self._secret, self._patience.attempt)
        except BaseException:
            connection.close()
            raise

    def _beat(self) -> None:
        while not self._ended.wait(self._patience.beat):
            try:
                answer, _ = self.request("alive")
            except PeerLostError as error:
                if not self._ended.is_set():
                    self._failure = error.failure
                return
            if answer["failure"] is not None:
                self._failure = Failure(**answer["failure"])
