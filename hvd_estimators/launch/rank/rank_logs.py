"""Logs of a launch's ranks in a store: the start and the end of each rank's output.

Runs in the process that reads a rank's output, which outlives the rank: the Spark task, or the
driver of a `LocalBackend`. It writes the file every minute and when the rank has ended, so a lost
executor loses the last minute.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hvd_estimators.launch.rank.output import LineHandler, lines_left_out

if TYPE_CHECKING:
    from hvd_estimators.launch.rank.outcome import RankOutcome
    from hvd_estimators.store import Store

logger = logging.getLogger(__name__)

HALF_CHARS = 2**20
"""Number of characters that a log keeps of the start, and of the end, of a rank's output."""

_WRITE_SECONDS = 60.0
_CLOSE_SECONDS = 20.0


@dataclass(frozen=True)
class RankLogs:
    """Folder of a launch's logs. Sent from the driver to the tasks.

    Attributes
    ----------
    store : Store
        The store of the run.
    folder : str
        The folder, in the store.
    """

    store: Store = field(repr=False)
    folder: str

    def path(self, rank: int) -> str:
        """Return the path of a rank's log."""
        return f"{self.folder}/rank-{rank}.txt"


_current: ContextVar[RankLogs | None] = ContextVar("rank logs", default=None)


@contextlib.contextmanager
def logging_ranks(logs: RankLogs | None) -> Iterator[None]:
    """Let the backend that this thread runs in the block write the logs of its ranks."""
    # Not an argument of `Backend.run`, which backends of other packages implement.
    token = _current.set(logs)
    try:
        yield
    finally:
        _current.reset(token)


def current_rank_logs() -> RankLogs | None:
    """Return the logs of `logging_ranks`, or None outside of it."""
    return _current.get()


class RankLog:
    """Log of one rank, as a context manager around its process.

    An error of the store is logged, and does not end the rank.

    Parameters
    ----------
    logs : RankLogs or bytes or None
        The launch's logs, or their pickle; None writes nothing.
    rank : int
        The rank.
    """

    def __init__(self, logs: RankLogs | bytes | None, rank: int) -> None:
        self._logs = logs
        self._rank = rank
        self._lock = threading.Lock()
        self._start: list[str] = []
        self._end: collections.deque[str] = collections.deque()
        self._start_chars = self._end_chars = self._left_out = self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_regularly, daemon=True)

    def __enter__(self) -> Self:
        if self._logs is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._logs is not None:
            self._ended.set()
            # The store may not respond.
            self._thread.join(_CLOSE_SECONDS)

    def add(self, lines: Sequence[str]) -> None:
        """Add lines of the rank's output."""
        if self._logs is None:
            return
        with self._lock:
            self._count += len(lines)
            for line in lines:
                self._add(line)

    def add_outcome(self, outcome: RankOutcome) -> None:
        """Add a line with the rank's end, and the traceback of its exception."""
        lines = []
        if outcome.report is not None:
            lines = outcome.report.full_traceback.splitlines(keepends=True)
        how = f"failed: {outcome.headline}" if outcome.failed else "has ended"
        self.add([*lines, f"[rank {outcome.rank} on {outcome.host} {how}]\n"])

    def text(self) -> str:
        """Return the log: both ends of the output, and the number of lines between them."""
        with self._lock:
            gap = lines_left_out(self._left_out) if self._left_out else ""
            return f"{''.join(self._start)}{gap}{''.join(self._end)}"

    def tee(self, handler: LineHandler | None) -> LineHandler:
        """Return a handler that adds lines, and passes them on to another handler."""
        return functools.partial(self._add_and_pass, handler)

    def _add_and_pass(self, handler: LineHandler | None, lines: list[str]) -> None:
        self.add(lines)
        if handler is not None:
            handler(lines)

    def _add(self, line: str) -> None:
        # The start ends with the first line that does not fit.
        if not self._end and self._start_chars + len(line) <= HALF_CHARS:
            self._start.append(line)
            self._start_chars += len(line)
            return
        self._end.append(line)
        self._end_chars += len(line)
        while self._end_chars > HALF_CHARS:
            self._end_chars -= len(self._end.popleft())
            self._left_out += 1

    def _write_regularly(self) -> None:
        try:
            self._write_until_ended()
        except Exception:  # a package of the store is missing
            logger.warning("The log of rank %d is not written", self._rank, exc_info=True)

    def _write_until_ended(self) -> None:
        # Ranks of `run` need no store, nor its packages.
        from hvd_estimators.store.redaction import redacted

        logs = pickle.loads(self._logs) if isinstance(self._logs, bytes) else self._logs
        assert logs is not None
        store, path = logs.store, logs.path(self._rank)
        written = is_failing = False
        count = 0
        while not written:
            written = self._ended.wait(_WRITE_SECONDS)
            if self._count == count:
                continue
            count = self._count
            try:
                store.write_text(path, redacted(self.text(), store.secrets))
                is_failing = False
            except Exception as error:
                text = redacted(str(error), store.secrets)
                log = logger.debug if is_failing else logger.warning
                log("The log of rank %d could not be written: %s", self._rank, text)
                is_failing = True
