"""Output of ranks: read by line, kept at its ends, and relayed, in bounded memory."""

from __future__ import annotations

import codecs
import collections
import io
import locale
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable with TensorFlow's minimum log level; 0 logs all lines."""

LineHandler = Callable[[str, list[str]], None]
"""Called with a stream's name (``"stdout"``, ``"stderr"`` or both as ``""``) and its lines."""

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**23
# Approximate memory that Python needs for a line in addition to its text.
_LINE_BYTES = 128
_PATIENCE_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_NOTE_SECONDS = 1.0

_LINE_CHARS = 8192
_TAIL_CHARS = 2**16
_TAIL_LINES = 60
_READ_BYTES = 2**16
_POLL_MILLISECONDS = 100
# More than the capacity of a pipe.
_DRAIN_BYTES = 2**21
_JOIN_SECONDS = 10.0


def lines_left_out(count: int) -> str:
    """Return a placeholder line for a number of omitted lines."""
    return f"[... {count:,} lines left out ...]\n"


def shortened(text: str, limit: int = _TAIL_CHARS, left_out: int = 0) -> str:
    """Shorten a text to about a length: keep both ends and the number of omitted characters.

    Parameters
    ----------
    text : str
        The text.
    limit : int
        Number of characters to keep.
    left_out : int
        Number of characters that were removed from the middle before.
    """
    half = limit // 2
    left_out += max(len(text) - 2 * half, 0)
    if not left_out:
        return text
    return f"{text[:half]}[... {left_out:,} characters left out ...]{text[-half:]}"


class Relay:
    """Relay of lines to a possibly slow function in a separate thread; used as a context manager.

    When the block ends, remaining lines are delivered for at most ten seconds.

    The queue holds about 8 MiB of lines. When it is full, the caller of `put` waits: for at most
    five seconds until the queue is empty again. After that, lines are dropped until the queue is
    empty, and a line reports how many.

    Parameters
    ----------
    deliver : callable
        Called with a stream's name and lines of one `put`. After it has raised an error, it is not
        called again.
    """

    def __init__(self, deliver: LineHandler) -> None:
        self._deliver = _until_failure(deliver)
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[str, list[str]]] = collections.deque()
        self._bytes = self._dropped = 0
        self._dropped_stream = ""
        self._is_closed = False
        self._waited = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, stream: str, lines: list[str]) -> None:
        """Queue all lines of a stream, or drop all of them if they do not fit."""
        size = _size(lines)

        def has_room() -> bool:
            # A single batch may exceed the limit, for example one of many empty lines.
            return self._bytes + size <= _MOST_BYTES or not self._queue or self._is_closed

        with self._changed:
            if not self._dropped and not has_room():
                started = time.monotonic()
                self._changed.wait_for(has_room, max(_PATIENCE_SECONDS - self._waited, 0))
                self._waited += time.monotonic() - started
            if self._dropped or not has_room():
                self._dropped += len(lines)
                self._dropped_stream = stream
            elif not self._is_closed:
                self._queue.append((stream, lines))
                self._bytes += size
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait for the delivery of all lines, for a limited time; drop the remaining lines."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        with self._changed:
            for stream, lines in self._queue:
                self._dropped_stream = stream
                self._dropped += len(lines)
            self._queue.clear()
        self._thread.join(_NOTE_SECONDS)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._deliver(*batch)

    def _next_batch(self) -> tuple[str, list[str]] | None:
        """Wait for lines, or for the number of dropped ones; return None after the last ones."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._dropped or self._is_closed)
            batch = None
            if self._queue:
                batch = self._queue.popleft()
                self._bytes -= _size(batch[1])
            elif self._dropped:
                batch = self._dropped_stream, [lines_left_out(self._dropped)]
                self._dropped = 0
            if not self._queue:
                self._waited = 0.0
            self._changed.notify_all()
            return batch


def _size(lines: list[str]) -> int:
    return sum(map(len, lines)) + _LINE_BYTES * len(lines)


def _until_failure(deliver: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that passes lines on until an error, which it logs.

    A rank would block on printing if the reader of its output failed.
    """
    is_failed = False

    def attempt(*lines: Any) -> None:
        nonlocal is_failed
        if is_failed:
            return
        try:
            deliver(*lines)
        except Exception:
            is_failed = True
            logger.warning("The output of a rank cannot be delivered", exc_info=True)

    return attempt


class BothEnds:
    """The first and the last lines of a text, and the number of lines between them.

    Any thread may add lines.

    Parameters
    ----------
    start_chars, end_chars : int
        Maximum number of characters of the first and of the last lines.
    end_lines : float
        Maximum number of the last lines. Default: no limit.
    """

    def __init__(self, start_chars: int, end_chars: int, end_lines: float = math.inf) -> None:
        self._lock = threading.Lock()
        self._start: list[str] = []
        self._end: collections.deque[str] = collections.deque()
        self._room, self._end_chars, self._end_lines = start_chars, end_chars, end_lines
        self._chars = 0
        self.count = 0
        """Number of all lines so far."""

    def add(self, lines: Iterable[str]) -> None:
        """Add lines."""
        with self._lock:
            for line in lines:
                self.count += 1
                # The start ends with the first line that does not fit.
                if not self._end and len(line) <= self._room:
                    self._start.append(line)
                    self._room -= len(line)
                    continue
                self._end.append(line)
                self._chars += len(line)
                while self._chars > self._end_chars or len(self._end) > self._end_lines:
                    self._chars -= len(self._end.popleft())

    def text(self) -> str:
        """Return the lines, with a line about omitted ones."""
        with self._lock:
            left_out = self.count - len(self._start) - len(self._end)
            gap = lines_left_out(left_out) if left_out else ""
            return f"{''.join(self._start)}{gap}{''.join(self._end)}"


class _Stream:
    """Decoder that splits the bytes of one of a process's streams into lines."""

    def __init__(self, on_lines: Callable[[list[str]], None]) -> None:
        encoding = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
        # Progress bars end their lines with a carriage return.
        self._decoder = io.IncrementalNewlineDecoder(encoding("replace"), translate=True)
        self._rest = ""
        self._left_out = 0  # characters of the unfinished line
        self._on_lines = on_lines

    def add(self, chunk: bytes, final: bool = False) -> None:
        *ended, rest = (self._rest + self._decoder.decode(chunk, final)).split("\n")
        lines = [f"{self._shortened(line)}\n" for line in ended]
        if final and rest:
            lines.append(self._shortened(rest))
        if lines:
            self._on_lines(lines)
        self._left_out += max(len(rest) - _LINE_CHARS, 0)
        half = _LINE_CHARS // 2
        self._rest = rest if len(rest) <= _LINE_CHARS else rest[:half] + rest[-half:]

    def _shortened(self, line: str) -> str:
        left_out, self._left_out = self._left_out, 0
        return shortened(line, _LINE_CHARS, left_out)


class OutputReader:
    """Reader of a process's output in another thread, which keeps the end of the output.

    Parameters
    ----------
    streams : mapping of int to str
        The reading end of each pipe, and the name of its stream.
    on_lines : callable
        Called with batches of a stream's lines. Only the two ends of a long line are passed. After
        the function has raised an error, it is not called again.
    """

    def __init__(self, streams: Mapping[int, str], on_lines: LineHandler) -> None:
        self._tail = BothEnds(0, _TAIL_CHARS, _TAIL_LINES)
        self._process_ended = threading.Event()
        self._on_lines = _until_failure(on_lines)
        self._streams = {pipe: _Stream(self._handler(name)) for pipe, name in streams.items()}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """Read all output so far. Call this once the process has ended.

        Does not wait for surviving child processes, which may hold the pipes open.

        Returns
        -------
        bool
            Whether the reading thread has ended.
        """
        self._process_ended.set()
        self._thread.join(timeout=_JOIN_SECONDS)
        return not self._thread.is_alive()

    def tail(self) -> str:
        """Return the end of the output."""
        return self._tail.text()

    def _read(self) -> None:
        poller = select.poll()
        for pipe in self._streams:
            poller.register(pipe, select.POLLIN)
        open_streams = dict(self._streams)
        drained = 0
        while open_streams and drained < _DRAIN_BYTES:
            has_ended = self._process_ended.is_set()
            ready = [pipe for pipe, _ in poller.poll(_POLL_MILLISECONDS)]
            if has_ended and not ready:
                break
            for pipe in ready:
                chunk = os.read(pipe, _READ_BYTES)
                drained += len(chunk) if has_ended else 0
                if not chunk:
                    poller.unregister(pipe)
                    open_streams.pop(pipe).add(b"", final=True)
                    continue
                open_streams[pipe].add(chunk)
        for stream in open_streams.values():
            stream.add(b"", final=True)

    def _handler(self, name: str) -> Callable[[list[str]], None]:
        def handle(lines: list[str]) -> None:
            self._tail.add(lines)
            self._on_lines(name, lines)

        return handle
