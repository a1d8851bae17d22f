"""Output of ranks: read by line, kept at its ends, and relayed, in bounded memory."""

from __future__ import annotations

import codecs
import collections
import io
import locale
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
"""Environment variable with TensorFlow's minimum log level; 0 logs all lines."""

LineHandler = Callable[[str, list[str]], None]
"""Called with a stream's name (``"stdout"``, ``"stderr"`` or both as ``""``) and its lines."""

logger = logging.getLogger(__name__)

# Each has about as many bytes as are read at once.
_MOST_BATCHES = 256
_PATIENCE_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_NOTE_SECONDS = 1.0

_LINE_CHARS = 8192
_TAIL_CHARS = 2**16
_TAIL_LINES = 60
_READ_BYTES = 2**14
_POLL_MILLISECONDS = 100
# More than the capacity of a pipe.
_DRAIN_BYTES = 2**21
_JOIN_SECONDS = 10.0


def lines_left_out(count: int) -> str:
    """Return a placeholder line for a number of omitted lines."""
    return f"[... {count:,} lines left out ...]\n"


def shortened(text: str, limit: int = _TAIL_CHARS) -> str:
    """Shorten a text to about a length: keep both ends and the number of omitted characters.

    Parameters
    ----------
    text : str
        The text.
    limit : int
        Number of characters to keep.
    """
    half = limit // 2
    left_out = len(text) - 2 * half
    if left_out <= 0:
        return text
    return f"{text[:half]}[... {left_out:,} characters left out ...]{text[-half:]}"


class Relay:
    """Relay of lines to a possibly slow function in a separate thread; used as a context manager.

    When the block ends, remaining lines are delivered for at most ten seconds.

    The queue holds 256 batches of lines. When it is full, the caller of `put` waits: for at most
    five seconds until the queue is empty again. After that, batches are dropped while it is full,
    and a line reports how many lines.

    Parameters
    ----------
    deliver : callable
        Called with a stream's name and lines of one `put`. After it has raised an error, it is not
        called again.
    """

    def __init__(self, deliver: LineHandler) -> None:
        self._deliver = _until_failure(deliver)
        self._queue: queue.SimpleQueue[tuple[str, list[str]] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MOST_BATCHES)
        self._patience = _PATIENCE_SECONDS
        self._dropped = 0
        self._is_late = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, stream: str, lines: list[str]) -> None:
        """Queue lines of a stream, or drop all of them if the queue is full."""
        if self._queue.empty():
            self._patience = _PATIENCE_SECONDS
        started = time.monotonic()
        if not self._room.acquire(timeout=max(self._patience, 0)):
            self._dropped += len(lines)
        else:
            self._queue.put((stream, [*self._note(), *lines]))
        self._patience -= time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Wait for the delivery of all lines, for a limited time; drop the remaining lines."""
        self._queue.put(None)
        self._thread.join(seconds)
        self._is_late = True
        self._thread.join(_NOTE_SECONDS)

    def _run(self) -> None:
        stream = ""
        while (batch := self._queue.get()) is not None:
            stream, lines = batch
            if self._is_late:
                self._dropped += len(lines)
            else:
                self._deliver(stream, lines)
            self._room.release()
        if note := self._note():
            self._deliver(stream, note)

    def _note(self) -> list[str]:
        """Return a line with the number of dropped lines, if there are any, and reset it."""
        count, self._dropped = self._dropped, 0
        return [lines_left_out(count)] if count else []


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


class _Stream:
    """Decoder that splits the bytes of one of a process's streams into lines of limited length."""

    def __init__(self, on_lines: Callable[[list[str]], None]) -> None:
        encoding = codecs.getincrementaldecoder(locale.getpreferredencoding(False))
        # Progress bars end their lines with a carriage return.
        self._decoder = io.IncrementalNewlineDecoder(encoding("replace"), translate=True)
        self._rest = ""
        self._on_lines = on_lines

    def add(self, chunk: bytes, final: bool = False) -> None:
        *ended, self._rest = (self._rest + self._decoder.decode(chunk, final)).split("\n")
        lines = [f"{line}\n" for line in ended]
        if self._rest and (final or len(self._rest) > _LINE_CHARS):
            lines.append(self._rest if final else f"{self._rest}\n")
            self._rest = ""
        if lines:
            self._on_lines(lines)


class OutputReader:
    """Reader of a process's output in another thread, which keeps the end of the output.

    Parameters
    ----------
    streams : mapping of int to str
        The reading end of each pipe, and the name of its stream.
    on_lines : callable
        Called with batches of a stream's lines. A line of more than 8192 characters is divided.
        After the function has raised an error, it is not called again.
    """

    def __init__(self, streams: Mapping[int, str], on_lines: LineHandler) -> None:
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._num_lines = 0
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
        """Return the end of the output, after a line about omitted ones."""
        lines = self._last_lines.copy()
        left_out = self._num_lines - len(lines)
        text = "".join(lines)[-_TAIL_CHARS:]
        return f"{lines_left_out(left_out) if left_out else ''}{text}"

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
            self._num_lines += len(lines)
            self._last_lines += lines
            self._on_lines(name, lines)

        return handle
