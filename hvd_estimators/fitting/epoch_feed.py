"""Metrics of epochs for slow stores and servers, passed on in another thread.

The driver handles the ranks' events one by one. Consumers in another thread delay neither the
display nor the ranks. Runs on the driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from hvd_estimators.store.redaction import redacted
from hvd_estimators.training.spec import HistoryRow

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN = 1.0


class EpochFeed:
    """Background thread that passes history rows to a slow consumer.

    Rows of several epochs are passed together if they have accumulated. If the consumer raises, the
    rows are dropped. The first failure is logged as a warning.

    Parameters
    ----------
    consume : callable
        The consumer. It gets rows, with all rows of an epoch together, from another thread.
    name : str
        Name of the consumer, for the warning.
    """

    def __init__(self, consume: Callable[[Sequence[HistoryRow]], None], name: str) -> None:
        self._consume = consume
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[Sequence[HistoryRow]] = []
        self._is_closed = False
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def put(self, rows: Sequence[HistoryRow]) -> None:
        """Queue the rows of an epoch, or no rows to call the consumer, without blocking."""
        with self._changed:
            self._waiting.append(rows)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float | None = None) -> bool:
        """Pass on the waiting rows and stop the thread.

        Parameters
        ----------
        seconds : float, optional
            Maximum time to wait. Default: no limit.

        Returns
        -------
        bool
            Whether the thread has ended.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                epochs, self._waiting = self._waiting, []
                is_last = self._is_closed
            if epochs:
                self._pass_on([row for rows in epochs for row in rows])
            if is_last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _SECONDS_BETWEEN)

    def _pass_on(self, rows: Sequence[HistoryRow]) -> None:
        try:
            self._consume(rows)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: metrics could not be written (%s: %s). They are written later if "
                    "possible; training continues.",
                    self._name,
                    type(error).__name__,
                    redacted(str(error)),
                )
