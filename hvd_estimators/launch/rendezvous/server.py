"""The rendezvous server in rank 0's task: Gloo's keys and the ranks' states."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hvd_estimators.launch.rendezvous.channel import Channel, Listener
from hvd_estimators.launch.timeouts import Patience

__all__ = ["Answer", "Failure", "JobStore", "RendezvousServer"]

Answer = tuple[dict[str, Any], bytes]


"""The values of an answer, among them ``status`` (as in HTTP), and its bytes."""


_OK, _FORBIDDEN, _NOT_FOUND, _CONFLICT = 200, 403, 404, 409


_LOOK_SECONDS = 0.5


# If so many times as much time passes between two looks, this process was paused, and the time says
# nothing about the ranks.
_PAUSED_LOOKS = 4


_KEY_WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class Failure:
    """Why a job cannot go on.

    Attributes
    ----------
    rank : int
        The rank that failed, or that has gone silent.
    host : str
        The machine that it ran on.
    why : str
        What happened, as a clause.
    lost : bool
        Whether the rank's task did not report this, and others concluded it from its silence.
    """

    rank: int
    host: str
    why: str
    lost: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.why}"


class JobStore:
    """Gloo's keys and the state of the ranks. Used from several threads.

    A key can be written only once. None can be written after all ranks have said that they have
    joined, until they say that they have left. A message that changes something carries a number,
    by which it is recognised if it comes again, since answers can get lost and messages can be
    late.

    Parameters
    ----------
    silence : float
        Seconds after which a silent rank counts as lost.

    Attributes
    ----------
    look_seconds : float
        How often `look` is to be called.
    """

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self.look_seconds = min(_LOOK_SECONDS, silence / 20)
        self._changed = threading.Condition()
        self._keys: dict[tuple[str, str], bytes] = {}
        self._hosts: list[str] = []
        self._silent: dict[int, float] = {}
        self._joined: set[int] = set()
        self._closed = False
        self._done: set[int] = set()
        self._failure: Failure | None = None
        self._answered: dict[tuple[int, int], Answer] = {}
        self._handlers: Mapping[str, Callable[..., Answer]] = {
            "put": self._put,
            "get": self._get,
            "delete": self._delete,
            "joined": self._join,
            "left": self._leave,
            "alive": self._alive,
            "failed": self._fail,
            "done": self._end,
        }

    def expect(self, hosts: Sequence[str]) -> None:
        """Announce the ranks that will come, by the host of each, in their order."""
        with self._changed:
            self._hosts = list(hosts)
            self._silent = {rank: 0.0 for rank in range(len(hosts))} | self._silent

    def handle(self, message: Mapping[str, Any], body: bytes = b"") -> Answer:
        """Answer one message of a rank's task."""
        arguments = dict(message)
        handler = self._handlers.get(arguments.pop("kind", ""))
        number = arguments.pop("number", None)
        if handler is None:
            return {"status": _NOT_FOUND}, b""
        rank = arguments["rank"]
        with self._changed:
            if rank in self._silent:
                self._silent[rank] = 0.0
            if number is None:
                return handler(body=body, **arguments)
            if (rank, number) not in self._answered:
                self._answered[rank, number] = handler(body=body, **arguments)
            return self._answered[rank, number]

    def failure(self) -> Failure | None:
        """Return the first failure, if there was one."""
        return self._failure

    def look(self, seconds: float) -> None:
        """Note how many seconds have passed since the last call, or since the start.

        A rank that was silent for too long counts as lost.
        """
        with self._changed:
            for rank in self._silent.keys() - self._done:
                self._silent[rank] += min(seconds, _PAUSED_LOOKS * self.look_seconds)
                if self._is_lost(rank) and self._failure is None:
                    why = f"has not been heard of for {self._silence:g} s"
                    self._failure = Failure(rank, self._hosts[rank], why, lost=True)
            self._changed.notify_all()

    def wait_for_all(self) -> list[int]:
        """Wait until every rank is lost or has finished with this store; return the lost ones.

        It ends only if `look` is called meanwhile.
        """

        def pending() -> set[int]:
            return {r for r in self._silent.keys() - self._done if not self._is_lost(r)}

        with self._changed:
            self._changed.wait_for(lambda: not pending())
            return sorted(self._silent.keys() - self._done)

    def _is_lost(self, rank: int) -> bool:
        return self._silent[rank] >= self._silence

    def _may_write(self, rank: int) -> bool:
        return not (self._closed and rank in self._joined)

    def _put(self, rank: int, scope: str, key: str, body: bytes) -> Answer:
        if not self._may_write(rank):
            return {"status": _FORBIDDEN}, b""
        if self._keys.setdefault((scope, key), body) != body:
            return {"status": _CONFLICT}, b""
        self._changed.notify_all()
        return {"status": _OK}, b""

    def _get(self, rank: int, scope: str, key: str, body: bytes) -> Answer:
        # Gloo waits for the keys of other ranks, which are numbers; it asks for others only once.
        if key.isdecimal() and (scope, key) not in self._keys:
            self._changed.wait_for(lambda: (scope, key) in self._keys, _KEY_WAIT_SECONDS)
        value = self._keys.get((scope, key))
        return ({"status": _NOT_FOUND}, b"") if value is None else ({"status": _OK}, value)

    def _delete(self, rank: int, scope: str, key: str, body: bytes) -> Answer:
        if not self._may_write(rank):
            return {"status": _FORBIDDEN}, b""
        self._keys.pop((scope, key), None)
        return {"status": _OK}, b""

    def _join(self, rank: int, body: bytes) -> Answer:
        self._joined.add(rank)
        if self._hosts and len(self._joined) == len(self._hosts):
            self._closed = True
            self._keys.clear()
        return {"status": _OK}, b""

    def _leave(self, rank: int, body: bytes) -> Answer:
        self._joined.discard(rank)
        self._closed = self._closed and bool(self._joined)
        return {"status": _OK}, b""

    def _alive(self, rank: int, body: bytes) -> Answer:
        failure = None if self._failure is None else asdict(self._failure)
        return {"status": _OK, "failure": failure}, b""

    def _fail(self, rank: int, host: str, why: str, body: bytes) -> Answer:
        if self._failure is None:
            self._failure = Failure(rank, host, why)
        return {"status": _OK}, b""

    def _end(self, rank: int, body: bytes) -> Answer:
        self._done.add(rank)
        self._changed.notify_all()
        return {"status": _OK}, b""


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
