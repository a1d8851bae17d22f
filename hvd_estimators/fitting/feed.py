"""What is measured while ranks train, handed on by a thread of its own. Runs on the driver.

Events of ranks are handled one by one: a store or a server that answers late must hold up neither
the progress that is shown nor the ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from hvd_estimators.store.errors import redacted
from hvd_estimators.training.spec import HistoryRow

__all__ = ["EpochFeed"]

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN = 1.0
_SECONDS_AFTER_FAILURE = 10.0


class EpochFeed:
    """Gives rows of a history to somebody slow, as soon as they are there, several epochs at once.

    What raises is tried again with what comes next; the first failure is a warning.

    Parameters
    ----------
    take : callable
        Gets rows, those of an epoch together, or none by `start`; called from another thread.
    what : str
        Who takes them, for the warning.
    """

    def __init__(self, take: Callable[[Sequence[HistoryRow]], None], what: str) -> None:
        self._take = take
        self._what = what
        self._changed = threading.Condition()
        self._waiting: list[HistoryRow] = []
        self._is_due = False
        self._has_ended = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let it be called before there are any rows; returns at once."""
        self._is_due = True
        self.put(())

    def put(self, rows: Sequence[HistoryRow]) -> None:
        """Hand on the rows of an epoch; returns at once."""
        with self._changed:
            self._waiting.extend(rows)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._what, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> bool:
        """Hand on what waits, and end.

        Parameters
        ----------
        seconds : float, optional
            How long to wait for that. Default: as long as it takes.

        Returns
        -------
        bool
            Whether all was taken.
        """
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
        return not self._waiting and not self._is_due

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_due or self._has_ended)
                rows, self._waiting = self._waiting, []
                is_due, self._is_due = self._is_due, False
                last = self._has_ended
            pause = _SECONDS_BETWEEN
            if (rows or is_due) and not self._took(rows):
                pause = _SECONDS_AFTER_FAILURE
                with self._changed:
                    self._waiting[:0] = rows
                    self._is_due = True
            if last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended, pause)

    def _took(self, rows: Sequence[HistoryRow]) -> bool:
        try:
            self._take(rows)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: could not be told what was measured (%s: %s). It is tried again while "
                    "training goes on.",
                    self._what,
                    type(error).__name__,
                    redacted(str(error)),
                )
            return False
        return True
