"""Logs of a launch's ranks in a store: the start and the end of each rank's output.

Runs in the process that reads a rank's output, which outlives the rank: the Spark task, or the
driver of a `LocalBackend`. It writes the file every minute and when the rank has ended, so a lost
executor loses the last minute.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hvd_estimators.launch.rank.output import BothEnds

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
        self._ends = BothEnds(HALF_CHARS, HALF_CHARS)
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
        if self._logs is not None:
            self._ends.add(lines)

    def add_outcome(self, outcome: RankOutcome) -> None:
        """Add a line with the rank's end, and the traceback of its exception."""
        lines = []
        if outcome.report is not None:
            lines = outcome.report.traceback.splitlines(keepends=True)
        how = f"failed: {outcome.headline}" if outcome.failed else "has ended"
        self.add([*lines, f"[rank {outcome.rank} on {outcome.host} {how}]\n"])

    def _write_regularly(self) -> None:
        """Write the log every minute and at the end, if there are new lines."""
        has_ended, count, last_problem = False, 0, ""
        while not has_ended:
            has_ended = self._ended.wait(_WRITE_SECONDS)
            if self._ends.count == count:
                continue
            count = self._ends.count
            problem = self._write()
            if problem and problem != last_problem:
                logger.warning("The log of rank %d could not be written: %s", self._rank, problem)
            last_problem = problem

    def _write(self) -> str:
        """Write the log, and return the error if that fails."""
        try:
            # Ranks of `run` need no store, nor its packages, which may be missing.
            from hvd_estimators.store.redaction import redacted

            if isinstance(self._logs, bytes):
                self._logs = pickle.loads(self._logs)
            assert isinstance(self._logs, RankLogs)
            store = self._logs.store
        except Exception as error:
            return str(error)
        try:
            store.write_text(
                self._logs.path(self._rank), redacted(self._ends.text(), store.secrets)
            )
        except Exception as error:
            return redacted(str(error), store.secrets)
        return ""
