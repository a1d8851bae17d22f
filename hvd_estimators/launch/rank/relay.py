"""Passes on what a process prints, as fast as it is taken, in bounded memory and time."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from typing_extensions import Self

__all__ = ["Allowance", "Relay", "lines_left_out"]

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**23
_BATCH_BYTES = 2**16
# What Python needs for a line beside its text, in about.
_LINE_BYTES = 128
_PATIENCE_SECONDS = 5.0
# Of the time that a process runs, this much it may be held up because nobody takes its output.
_PATIENCE_SHARE = 0.1
_CLOSE_SECONDS = 10.0
_NOTE_SECONDS = 1.0


def lines_left_out(count: int) -> str:
    """Return the line that stands for lines that are not passed on."""
    return f"[... {count:,} lines left out ...]\n"


class Allowance:
    """An amount that is used up, and comes back with time.

    Parameters
    ----------
    most : float
        What there is at first, and at most.
    per_second : float
        What comes back in a second.
    """

    def __init__(self, most: float, per_second: float) -> None:
        self._most = self._left = most
        self._per_second = per_second
        self._counted = time.monotonic()

    def left(self) -> float:
        """Return what is left; at least 0."""
        now = time.monotonic()
        back = (now - self._counted) * self._per_second
        self._left, self._counted = min(self._left + back, self._most), now
        return max(self._left, 0.0)

    def use(self, amount: float) -> None:
        """Use up an amount, which may be more than is left."""
        self.left()
        self._left -= amount


class Relay:
    """Hands lines to a function that may be slow, in a thread of its own, as a context manager.

    When the block ends lines that still wait are handed on, for ten seconds at most.

    About 8 MiB of lines wait at most. When they do, who brings more waits for up to five seconds,
    which come back with time (a tenth of it). Then lines are left out until half of those that wait
    have been taken, and a line says how many.

    Parameters
    ----------
    deliver : callable
        Called with some lines at a time, each a pair of its stream's name and its text. When it
        has raised, it is not called again.
    one_by_one : bool
        Whether it is called with a single line at a time, for one that may take long for each.
    """

    def __init__(
        self, deliver: Callable[[Sequence[tuple[str, str]]], None], *, one_by_one: bool = False
    ) -> None:
        self._batch_bytes = 1 if one_by_one else _BATCH_BYTES
        self._deliver: Callable[[Sequence[tuple[str, str]]], None] | None = deliver
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[str, str]] = collections.deque()
        self._bytes = 0
        self._left_out: dict[str, int] = {}
        self._drops = False
        self._ending = False
        self._patience = Allowance(_PATIENCE_SECONDS, _PATIENCE_SHARE)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, stream: str, lines: Sequence[str]) -> None:
        """Pass on lines of a stream: all of them, or, where there is no room for them, none."""
        with self._changed:
            if self._ending:
                return
            if not self._has_room(sum(map(_size, lines))):
                self._left_out[stream] = self._left_out.get(stream, 0) + len(lines)
                return
            self._note_what_is_left_out()
            for line in lines:
                self._append(stream, line)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait until all is handed on, for some seconds at most; what is left then is left out."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if self._thread.is_alive():
            with self._changed:
                for stream, _ in self._waiting:
                    self._left_out[stream] = self._left_out.get(stream, 0) + 1
                self._waiting.clear()
                self._bytes = 0
            self._thread.join(_NOTE_SECONDS)

    def _has_room(self, size: int) -> bool:
        """Return whether so many bytes may wait, too; waits for that for a moment."""
        most = _MOST_BYTES // 2 if self._drops else _MOST_BYTES

        def fits() -> bool:
            # Many empty lines are more at once than may wait.
            return self._bytes + size <= most or not self._waiting

        if fits():
            self._drops = False
        elif not self._drops:
            started = time.monotonic()
            self._changed.wait_for(lambda: fits() or self._ending, self._patience.left())
            self._patience.use(time.monotonic() - started)
            self._drops = not fits()
        return not self._drops

    def _append(self, stream: str, line: str) -> None:
        self._waiting.append((stream, line))
        self._bytes += _size(line)

    def _note_what_is_left_out(self) -> None:
        for stream, count in self._left_out.items():
            self._append(stream, lines_left_out(count))
        self._left_out.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    self._note_what_is_left_out()
                if not self._waiting:
                    return
                batch = self._next_batch()
                self._changed.notify_all()
            if self._deliver is None:
                continue
            try:
                self._deliver(batch)
            except Exception:
                # Who prints would wait if nobody took it.
                self._deliver = None
                logger.warning("The output of a rank cannot be passed on", exc_info=True)

    def _next_batch(self) -> list[tuple[str, str]]:
        batch: list[tuple[str, str]] = []
        size = 0
        while self._waiting and size < self._batch_bytes:
            batch.append(self._waiting.popleft())
            size += _size(batch[-1][1])
        self._bytes -= size
        return batch


def _size(line: str) -> int:
    return len(line) + _LINE_BYTES
