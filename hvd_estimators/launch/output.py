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
from collections.abc import Callable, Iterator

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

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._chars += len(line)
        while len(self._lines) > _TAIL_LINES or self._chars > _TAIL_CHARS:
            self._chars -= len(self._lines.popleft())
            self._left_out += 1

    def text(self) -> str:
        before = f"[... {self._left_out:,} lines left out ...]\n" if self._left_out else ""
        return before + "".join(self._lines)


class OutputReader:
    """Reads what a process prints, from another thread, and keeps the end of it.

    Parameters
    ----------
    descriptor : int
        The reading end of a pipe.
    on_line : callable, optional
        Called with each line: with its two ends only, if it is long. One that raises is not
        called again.
    """

    def __init__(self, descriptor: int, on_line: Callable[[str], None] | None) -> None:
        self._descriptor = descriptor
        self._on_line = on_line
        self._tail = _Tail()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """Take all output so far; call this once the process has ended.

        A process that it left behind may hold the pipe open, and is not waited for.

        Returns
        -------
        bool
            Whether nobody reads from the pipe any more.
        """
        self._ended.set()
        self._thread.join(timeout=_JOIN_SECONDS)
        return not self._thread.is_alive()

    def tail(self) -> str:
        """Return the end of what was printed."""
        with self._lock:
            return self._tail.text()

    def _read(self) -> None:
        line = _Line(_LINE_CHARS)
        for text in self._texts():
            *finished, rest = text.split("\n")
            for piece in finished:
                line.add(piece)
                self._take(f"{line.text()}\n")
                line = _Line(_LINE_CHARS)
            line.add(rest)
        if line.text():
            self._take(line.text())

    def _texts(self) -> Iterator[str]:
        """Yield the output with all line ends as newlines, until it ends."""
        encoding = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
        decoder = io.IncrementalNewlineDecoder(encoding("replace"), translate=True)
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        drained = 0
        while drained < _DRAIN_BYTES:
            ended = self._ended.is_set()
            if poller.poll(_POLL_MILLISECONDS):
                chunk = os.read(self._descriptor, _READ_BYTES)
                if not chunk:
                    break
                drained += len(chunk) if ended else 0
                yield decoder.decode(chunk)
            elif ended:
                break
        yield decoder.decode(b"", final=True)

    def _take(self, line: str) -> None:
        with self._lock:
            self._tail.add(line)
        if self._on_line is not None:
            try:
                self._on_line(line)
            except Exception:
                # A rank would block on printing if nobody read its output.
                self._on_line = None
                logger.warning("The output of a rank cannot be passed on", exc_info=True)
