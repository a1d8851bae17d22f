"""What the ranks of a job tell each other through rank 0's task: Gloo's keys, and their state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Answer", "Failure", "JobStore"]

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
