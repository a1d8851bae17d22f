"""Rendezvous server in rank 0's task: Gloo's keys and the state of the ranks."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from hvd_estimators.launch import timeouts
from hvd_estimators.launch.rendezvous.channel import Channel, Listener
from hvd_estimators.launch.timeouts import Patience

Answer = tuple[dict[str, Any], bytes]
"""Values of an answer, including ``status`` (as in HTTP), and its bytes."""

_OK, _NOT_FOUND = 200, 404

# More ranks than Gloo can connect.
_MAX_MEMBERS = 2**16


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, which ends the job.

    Attributes
    ----------
    rank : int
        The rank that failed or became silent.
    host : str
        The machine that the rank ran on.
    why : str
        The reason, as a clause.
    lost : bool
        Whether the failure was inferred from the connection of the rank's task, not reported by it.
    """

    rank: int
    host: str
    why: str
    lost: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} {self.why}"


class _Waits:
    """Waiting threads of a store, each with a condition on one scope.

    Callers hold the store's lock.

    A change wakes only the threads whose condition holds now. If it woke all, N ranks that wait for
    each other's keys would be woken N^2 times.

    Parameters
    ----------
    lock : threading.Lock
        The store's lock.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._pending: dict[str, list[tuple[Callable[[], bool], threading.Condition]]] = {}

    def wait(self, scope: str, is_met: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition on a scope holds, for a limited time."""
        if is_met():
            return
        pending = is_met, threading.Condition(self._lock)
        self._pending.setdefault(scope, []).append(pending)
        try:
            pending[1].wait(seconds)
        finally:
            self._pending[scope].remove(pending)

    def notify(self, scope: str) -> None:
        """Wake the threads whose condition on a scope holds now."""
        for is_met, condition in self._pending.get(scope, ()):
            if is_met():
                condition.notify()


class JobStore:
    """Thread-safe store of the keys of Gloo and torch, and of the state of the ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rank_ended = threading.Condition(self._lock)
        self._waits = _Waits(self._lock)
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._hosts: list[str] = []
        self._heard: set[int] = set()
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._failure: Failure | None = None
        self._handlers: Mapping[str, Callable[..., Answer]] = {
            "set": self._set,
            "get": self._get,
            "get_parts": self._get_parts,
            "add": self._add,
            "delete": self._delete,
            "alive": self._alive,
            "failed": self._fail,
            "done": self._end,
        }

    def expect(self, hosts: Sequence[str]) -> None:
        """Register the ranks of the job by their hosts, in the order of the ranks."""
        with self._lock:
            self._hosts = list(hosts)

    def handle(self, message: Mapping[str, Any], body: bytes = b"") -> Answer:
        """Answer one message from a rank's task."""
        arguments = dict(message)
        handler = self._handlers[arguments.pop("kind")]
        with self._lock:
            self._heard.add(arguments["rank"])
            return handler(body=body, **arguments)

    def failure(self) -> Failure | None:
        """Return the first failure, if any."""
        return self._failure

    def lose(self, rank: int, why: str) -> None:
        """Record that a rank is lost for a reason, unless it has finished with this store."""
        with self._lock:
            if rank in range(len(self._hosts)) and rank not in self._done:
                self._lost.add(rank)
                if self._failure is None:
                    self._failure = Failure(rank, self._hosts[rank], why, lost=True)
                self._rank_ended.notify_all()

    def lose_unheard(self, why: str) -> None:
        """Record that all ranks that have sent no message are lost, except for the store's own."""
        for rank in range(1, len(self._hosts)):
            if rank not in self._heard:
                self.lose(rank, why)

    def wait_for_all(self) -> list[int]:
        """Wait until every rank is lost or has finished with this store; return the lost ranks."""

        def pending() -> set[int]:
            return set(range(len(self._hosts))) - self._done

        with self._rank_ended:
            self._rank_ended.wait_for(lambda: pending() <= self._lost)
            return sorted(pending())

    def _get(
        self, rank: int, scope: str, keys: Sequence[str], body: bytes, seconds: float = math.inf
    ) -> Answer:
        """Return the values of all keys, joined, when all exist."""
        values = self._values(scope, keys, seconds)
        if values is None:
            return {"status": _NOT_FOUND}, b""
        return {"status": _OK}, b"".join(values)

    def _get_parts(self, rank: int, scope: str, key: str, count: int, body: bytes) -> Answer:
        """Return one part of each other member's value, joined: the part for the own key.

        The keys of the scope's members are the numbers below `count`. A value consists of parts of
        equal length, one for each other member, in the order of their numbers.
        """
        own = int(key)
        if not (0 <= own < count <= _MAX_MEMBERS and count > 1):
            raise ValueError(f"key {own} among {count} members")
        others = [number for number in range(count) if number != own]
        values = self._values(scope, [str(number) for number in others])
        if values is None:
            return {"status": _NOT_FOUND}, b""
        parts = []
        for other, value in zip(others, values, strict=True):
            length = len(value) // (count - 1)
            start = length * (own - (own > other))
            parts.append(value[start : start + length])
        return {"status": _OK}, b"".join(parts)

    def _set(self, rank: int, scope: str, key: str, body: bytes) -> Answer:
        self._keys(scope)[key] = body
        self._waits.notify(scope)
        return {"status": _OK}, b""

    def _add(self, rank: int, scope: str, key: str, amount: int, body: bytes) -> Answer:
        total = int(self._keys(scope).get(key, b"0")) + amount
        return self._set(rank, scope, key, str(total).encode())[0], str(total).encode()

    def _delete(self, rank: int, scope: str, key: str, body: bytes) -> Answer:
        existed = self._keys(scope).pop(key, None) is not None
        return {"status": _OK, "existed": existed}, b""

    def _keys(self, scope: str) -> dict[str, bytes]:
        return self._scopes.setdefault(scope, {})

    def _values(
        self, scope: str, keys: Sequence[str], seconds: float = math.inf
    ) -> list[bytes] | None:
        """Return the values of keys when all exist; None if they do not within half a second."""
        missing = list(keys)

        def exist() -> bool:
            # Keys that exist are not checked again, so all checks of N keys take O(N) in total.
            existing = self._keys(scope)
            while missing and missing[-1] in existing:
                missing.pop()
            return not missing

        self._waits.wait(scope, exist, min(seconds, timeouts.RENDEZVOUS_KEY))
        existing = self._keys(scope)
        # A key may have been deleted during the wait.
        is_complete = all(key in existing for key in keys)
        return [existing[key] for key in keys] if is_complete else None

    def _alive(self, rank: int, body: bytes) -> Answer:
        failure = None if self._failure is None else asdict(self._failure)
        return {"status": _OK, "failure": failure, "time": time.time()}, b""

    def _fail(self, rank: int, host: str, why: str, body: bytes) -> Answer:
        if self._failure is None:
            self._failure = Failure(rank, host, why)
        return {"status": _OK}, b""

    def _end(self, rank: int, body: bytes) -> Answer:
        self._done.add(rank)
        self._rank_ended.notify_all()
        return {"status": _OK}, b""


class RendezvousServer:
    """Server of a `JobStore` for clients that know the job's secret; used as a context manager.

    The constructor binds a port at each address, so that `endpoints` can be sent to the ranks.
    Clients can connect only to the addresses that `listen` selects.

    Parameters
    ----------
    secret : bytes
        The job's secret.
    addresses : sequence of str
        Addresses of this machine at which ranks may reach it, the likeliest first.
    patience : Patience
        Time limits, including how long ranks may be silent.

    Attributes
    ----------
    store : JobStore
        The keys and the state of the ranks.
    endpoints : list of (str, int)
        The addresses that could be bound, with their ports.
    """

    def __init__(
        self, secret: bytes, addresses: Sequence[str], patience: Patience | None = None
    ) -> None:
        self._secret = secret
        self._patience = patience or Patience()
        self.store = JobStore()
        self._listeners: list[Listener] = []
        for address in addresses:
            # The address may have disappeared, or may not be bindable.
            with contextlib.suppress(OSError):
                self._listeners.append(Listener(address, self._serve))
        self.endpoints = [(listener.address, listener.port) for listener in self._listeners]
        silence = self._patience.silence
        self._why_silent = f"has not been heard of for {silence:g} s"
        self._unheard = threading.Timer(silence, self.store.lose_unheard, [self._why_silent])
        self._unheard.daemon = True
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._unheard.cancel()
        self._ended.set()
        for listener in self._listeners:
            listener.close()

    def listen(self, address: str) -> None:
        """Accept connections at one of the addresses, and release the others.

        Ranks that do not connect in time count as lost.
        """
        self._unheard.start()
        for listener in self._listeners:
            if listener.address == address:
                listener.listen()
            else:
                listener.close()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel.accept(connection, self._secret, self._patience.attempt)
        rank, silence = -1, self._patience.silence
        try:
            while True:
                # A task sends a heartbeat every second. If this process was paused, it finds one.
                message, body = channel.receive(silence, silence)
                rank = message["rank"]
                channel.send(*self.store.handle(message, body), seconds=silence)
        except Exception as error:
            # A rank whose task has ended may still save its state, together with all others.
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                self._ended.wait(silence)
            self.store.lose(rank, self._why_silent)
            raise
