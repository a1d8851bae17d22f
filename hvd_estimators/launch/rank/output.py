"""A rank's output: it is passed on line by line, and its end is kept, in bounded memory."""

from __future__ import annotations

import codecs
import collections
import io
import locale
import logging
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence

__all__ = ["OutputReader", "shortened"]

logger = logging.getLogger(__name__)

_LINE_CHARS = 8192
_TAIL_CHARS = 2**16
_TAIL_LINES = 60
_READ_BYTES = 2**16
_POLL_MILLISECONDS = 100
# More than a pipe holds.
_DRAIN_BYTES = 2**21
_JOIN_SECONDS = 10.0


def shortened(text: str, limit: int = _TAIL_CHARS) -> str:
    """Shorten a text to about a length: keep its two ends, and say how much is left out."""
    if len(text) <= limit // 2 * 2:
        return text
    line = _Line(limit)
    line.add(text)
    return line.text()


class _Line:
    """A growing line, of which the start and the end are kept."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._start = self._end = ""
        self._length = 0

    def add(self, text: str) -> None:
        self._length += len(text)
        room = self._half - len(self._start)
        self._start += text[:room]
        self._end = (self._end + text[room:])[-self._half :]

    def text(self) -> str:
        left_out = self._length - len(self._start) - len(self._end)
        gap = f"[... {left_out:,} characters left out ...]" if left_out else ""
        return f"{self._start}{gap}{self._end}"


class _Tail:
    """As many of the last lines of a text as there is room for."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque()
        self._chars = self._left_out = 0

    def add(self, lines: Sequence[str]) -> None:
        kept = lines[-_TAIL_LINES:]
        self._left_out += len(lines) - len(kept)
        self._lines.extend(kept)
        self._chars += sum(map(len, kept))
        while len(self._lines) > _TAIL_LINES or self._chars > _TAIL_CHARS:
            self._chars -= len(self._lines.popleft())
            self._left_out += 1

    def text(self) -> str:
        before = f"[... {self._left_out:,} lines left out ...]\n" if self._left_out else ""
        return before + "".join(self._lines)


class _Stream:
    """One of a process's streams: bytes go in, lines come out."""

    def __init__(self, take: Callable[[list[str]], None]) -> None:
        encoding = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
        # Progress bars end their lines by a carriage return.
        self._decoder = io.IncrementalNewlineDecoder(encoding("replace"), translate=True)
        self._line = _Line(_LINE_CHARS)
        self._take = take

    def add(self, chunk: bytes, final: bool = False) -> None:
        *finished, rest = self._decoder.decode(chunk, final).split("\n")
        lines = [f"{shortened(piece, _LINE_CHARS)}\n" for piece in finished]
        if finished:
            self._line.add(finished[0])
            lines[0] = f"{self._line.text()}\n"
            self._line = _Line(_LINE_CHARS)
        self._line.add(rest)
        if final and self._line.text():
            lines.append(self._line.text())
        if lines:
            self._take(lines)


class OutputReader:
    """Reads what a process prints, from another thread, and keeps the end of it.

    Parameters
    ----------
    streams : mapping of int to callable or None
        The reading ends of pipes, and what is called with the lines from there, some at a time: of
        a long one with its two ends only. One that raises is not called again.
    select : callable, optional
        Takes lines and returns those that are passed on, and that the end holds.
    """

    def __init__(
        self,
        streams: Mapping[int, Callable[[list[str]], None] | None],
        select: Callable[[Sequence[str]], list[str]] | None = None,
    ) -> None:
        self._select = select
        self._tail = _Tail()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._streams = {pipe: _Stream(self._taker(take)) for pipe, take in streams.items()}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """Take all output so far; call this once the process has ended.

        A process that it left behind may hold the pipes open, and is not waited for.

        Returns
        -------
        bool
            Whether nobody reads from the pipes any more.
        """
        self._ended.set()
        self._thread.join(timeout=_JOIN_SECONDS)
        return not self._thread.is_alive()

    def tail(self) -> str:
        """Return the end of what was printed."""
        with self._lock:
            return self._tail.text()

    def _read(self) -> None:
        poller = select.poll()
        for pipe in self._streams:
            poller.register(pipe, select.POLLIN)
        left = dict(self._streams)
        drained = 0
        while left and drained < _DRAIN_BYTES:
            ended = self._ended.is_set()
            ready = [pipe for pipe, _ in poller.poll(_POLL_MILLISECONDS)]
            if ended and not ready:
                break
            for pipe in ready:
                chunk = os.read(pipe, _READ_BYTES)
                drained += len(chunk) if ended else 0
                if not chunk:
                    poller.unregister(pipe)
                    left.pop(pipe).add(b"", final=True)
                    continue
                left[pipe].add(chunk)
        for stream in left.values():
            stream.add(b"", final=True)

    def _taker(self, on_lines: Callable[[list[str]], None] | None) -> Callable[[list[str]], None]:
        def take(lines: list[str]) -> None:
            nonlocal on_lines
            if self._select is not None:
                lines = self._select(lines)
            if not lines:
                return
            with self._lock:
                self._tail.add(lines)
            if on_lines is not None:
                try:
                    on_lines(lines)
                except Exception:
                    # A rank would block on printing if nobody read its output.
                    on_lines = None
                    logger.warning("The output of a rank cannot be passed on", exc_info=True)

        return take
