"""The server in rank 0's task, over which the tasks of a job tell each other of their ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.launch.network.channel import Channel
from hvd_estimators.launch.network.listener import Listener
from hvd_estimators.launch.rendezvous.job_store import JobStore
from hvd_estimators.launch.rendezvous.patience import Patience

__all__ = ["RendezvousServer"]

_IDLE_SECONDS = 120.0


class RendezvousServer:
    """Answers those who know the job's secret from a `JobStore`; used as a context manager.

    Ports of all addresses are taken at once, so that they can be told, and nobody can connect to
    one that `listen` is not called for.

    Parameters
    ----------
    secret : bytes
        The job's secret.
    addresses : sequence of str
        Addresses of this machine at which ranks may be able to reach it, the likeliest first.
    patience : Patience
        How long ranks may be silent.

    Attributes
    ----------
    store : JobStore
        What is told and asked for.
    endpoints : list of (str, int)
        Addresses, those that could be taken, and their ports.
    """

    def __init__(
        self, secret: bytes, addresses: Sequence[str], patience: Patience | None = None
    ) -> None:
        self._secret = secret
        self._patience = patience or Patience()
        self.store = JobStore(self._patience.silence)
        self._listeners: list[Listener] = []
        for address in addresses:
            # An address can go away, or be of a kind that cannot be bound.
            with contextlib.suppress(OSError):
                self._listeners.append(Listener(address, self._serve))
        self.endpoints = [(listener.address, listener.port) for listener in self._listeners]
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._answering = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watcher.join()
        # What ended the block may be a message whose answer is on its way.
        with self._changed:
            self._changed.wait_for(lambda: not self._answering, self._patience.attempt)
        for listener in self._listeners:
            listener.close()

    def listen(self, wanted: Callable[[str], bool] = lambda address: True) -> None:
        """Let ranks connect to the addresses that are wanted, and to no other any more."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if wanted(listener.address):
                self._listeners.append(listener.listen())
            else:
                listener.close()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self.store.look_seconds):
            now = time.monotonic()
            self.store.look(now - before)
            before = now

    def _serve(self, connection: socket.socket, proved: Callable[[], None]) -> None:
        channel = Channel.accept(connection, self._secret, self._patience.attempt)
        proved()
        while True:
            message, body = channel.receive(_IDLE_SECONDS, self._patience.attempt)
            with self._in_answer():
                channel.send(*self.store.handle(message, body), seconds=self._patience.attempt)

    @contextlib.contextmanager
    def _in_answer(self) -> Iterator[None]:
        with self._changed:
            self._answering += 1
        try:
            yield
        finally:
            with self._changed:
                self._answering -= 1
                self._changed.notify_all()
