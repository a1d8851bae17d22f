"""Output of ranks: read by line, filtered, limited and relayed with bounded memory."""

from __future__ import annotations

import codecs
import collections
import io
import locale
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hvd_estimators.launch.gpus import visible_gpus

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable with TensorFlow's minimum log level; 0 logs all lines."""

LineHandler = Callable[[list[str]], None]
"""Called with lines of a rank's output."""

logger = logging.getLogger(__name__)

# Abseil's log format before its initialization: without a date. TensorFlow never initializes it.
_LINE = re.compile(r"([IWE])0000 00:00:\d+\.\d+ +\d+ \w+\.cc:\d+\] ")

_SEVERITIES = "IWE"
_ALWAYS = (
    re.compile("WARNING: All log messages before absl::InitializeLog"),
    # From libraries that TensorFlow's build links twice.
    re.compile(r".*\] Unable to register cu\w+ factory: Attempting to register factory"),
    re.compile(r".*\] computation placer already registered"),
)

_NO_GPU = re.compile(r".*\] failed call to cuInit")

_MOST_BYTES = 2**23
_BATCH_BYTES = 2**16
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


def log_filter(env: Mapping[str, str]) -> Callable[[Sequence[str]], list[str]] | None:
    """Return a filter for TensorFlow's lines below the log level of a rank's environment.

    TensorFlow logs some lines before it reads the variable. It logs other lines as errors that are
    not errors, for example that CUDA does not start on a machine without GPUs. Runs in the rank's
    parent.

    Parameters
    ----------
    env : mapping
        The rank's environment.

    Returns
    -------
    callable or None
        Takes lines and returns the lines to show. None if the environment asks for all lines.
    """
    level = env.get(LOG_LEVEL_VARIABLE, "")
    if not level.isdecimal() or int(level) == 0:
        return None
    below = _SEVERITIES[: int(level)]
    dropped = _ALWAYS if visible_gpus(env) else (*_ALWAYS, _NO_GPU)

    def is_shown(line: str) -> bool:
        if not line.startswith(("I0", "W0", "E0", "WARNING: All")):
            return True
        logged = _LINE.match(line)
        if logged is not None and logged[1] in below:
            return False
        return not any(pattern.match(line) for pattern in dropped)

    return lambda lines: [line for line in lines if is_shown(line)]


def lines_left_out(count: int) -> str:
    """Return a placeholder line for a number of omitted lines."""
    return f"[... {count:,} lines left out ...]\n"


class Relay:
    """Relay of lines to a possibly slow function in a separate thread; used as a context manager.

    When the block ends, remaining lines are delivered for at most ten seconds.

    The queue holds about 8 MiB of lines. When it is full, the caller of `put` waits: for at most
    five seconds until the queue is empty again. After that, lines are dropped until half of the
    queue has been delivered, and a line reports how many.

    Parameters
    ----------
    deliver : callable
        Called with a batch of lines, each a pair of the stream's name and the text. After it has
        raised an error, it is not called again.
    one_by_one : bool
        Whether to pass a single line at a time, for functions that may take long for each line.
    """

    def __init__(
        self, deliver: Callable[[Sequence[tuple[str, str]]], None], *, one_by_one: bool = False
    ) -> None:
        self._batch_bytes = 1 if one_by_one else _BATCH_BYTES
        self._deliver = _until_failure(deliver)
        self._changed = threading.Condition()
        self._queue: collections.deque[tuple[str, str]] = collections.deque()
        self._bytes = 0
        self._dropped: collections.Counter[str] = collections.Counter()
        self._is_closed = False
        self._waited = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, stream: str, lines: Sequence[str]) -> None:
        """Queue all lines of a stream, or drop all of them if they do not fit."""
        size = sum(map(_size, lines))
        with self._changed:
            if not self._dropped and not self._has_room(size):
                started = time.monotonic()
                left = max(_PATIENCE_SECONDS - self._waited, 0)
                self._changed.wait_for(lambda: self._has_room(size), left)
                self._waited += time.monotonic() - started
            if not self._has_room(size):
                self._dropped[stream] += len(lines)
            elif not self._is_closed:
                self._queue_notes()
                self._queue.extend((stream, line) for line in lines)
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
        if self._thread.is_alive():
            with self._changed:
                self._dropped.update(stream for stream, _ in self._queue)
                self._queue.clear()
                self._bytes = 0
            self._thread.join(_NOTE_SECONDS)

    def _has_room(self, size: int) -> bool:
        limit = _MOST_BYTES // 2 if self._dropped else _MOST_BYTES
        # A single batch may exceed the limit, for example one of many empty lines.
        return self._bytes + size <= limit or not self._queue or self._is_closed

    def _queue_notes(self) -> None:
        """Queue a line for each stream with dropped lines."""
        for stream, count in self._dropped.items():
            self._queue.append((stream, lines_left_out(count)))
            self._bytes += _size(self._queue[-1][1])
        self._dropped.clear()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._deliver(batch)

    def _next_batch(self) -> list[tuple[str, str]]:
        """Wait for lines, and return some of them; none after the last ones."""
        batch: list[tuple[str, str]] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if not self._queue:
                self._queue_notes()
            while self._queue and size < self._batch_bytes:
                batch.append(self._queue.popleft())
                size += _size(batch[-1][1])
            self._bytes -= size
            if not self._queue:
                self._waited = 0.0
            self._changed.notify_all()
        return batch


def _size(line: str) -> int:
    return len(line) + _LINE_BYTES


def _until_failure(deliver: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that passes lines on until an error, which it logs.

    A rank would block on printing if the reader of its output failed.
    """
    is_failed = False

    def attempt(lines: Any) -> None:
        nonlocal is_failed
        if is_failed:
            return
        try:
            deliver(lines)
        except Exception:
            is_failed = True
            logger.warning("The output of a rank cannot be delivered", exc_info=True)

    return attempt


def shortened(text: str, limit: int = _TAIL_CHARS) -> str:
    """Shorten a text to about a length: keep both ends and the number of omitted characters."""
    if len(text) <= limit // 2 * 2:
        return text
    line = _Line(limit)
    line.add(text)
    return line.text()


class _Line:
    """A growing line, of which only the start and the end are kept."""

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
    """The last lines of a text, limited in number and length."""

    def __init__(self) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._count = 0

    def add(self, lines: Sequence[str]) -> None:
        self._lines.extend(lines)
        self._count += len(lines)

    def text(self) -> str:
        lines = list(self._lines)
        while sum(map(len, lines)) > _TAIL_CHARS:
            del lines[0]
        left_out = self._count - len(lines)
        return (lines_left_out(left_out) if left_out else "") + "".join(lines)


class _Stream:
    """Decoder that splits the bytes of one of a process's streams into lines."""

    def __init__(self, on_lines: LineHandler) -> None:
        encoding = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
        # Progress bars end their lines with a carriage return.
        self._decoder = io.IncrementalNewlineDecoder(encoding("replace"), translate=True)
        self._line = _Line(_LINE_CHARS)
        self._on_lines = on_lines

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
            self._on_lines(lines)


class OutputReader:
    """Reader of a process's output in another thread, which keeps the end of the output.

    Parameters
    ----------
    streams : mapping of int to callable or None
        Maps the reading end of each pipe to a function that is called with batches of its lines.
        Only the two ends of a long line are passed. After the function has raised an error, it is
        not called again.
    select : callable, optional
        Takes lines and returns the lines to pass on and to keep.
    """

    def __init__(
        self,
        streams: Mapping[int, LineHandler | None],
        select: Callable[[Sequence[str]], list[str]] | None = None,
    ) -> None:
        self._select = select
        self._tail = _Tail()
        self._lock = threading.Lock()
        self._process_ended = threading.Event()
        self._streams = {
            pipe: _Stream(self._line_handler(on_lines)) for pipe, on_lines in streams.items()
        }
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
        with self._lock:
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

    def _line_handler(self, on_lines: LineHandler | None) -> LineHandler:
        deliver = _until_failure(on_lines or (lambda lines: None))

        def handle(lines: list[str]) -> None:
            if self._select is not None:
                lines = self._select(lines)
            if lines:
                with self._lock:
                    self._tail.add(lines)
                deliver(lines)

        return handle
