"""What the driver notes of a run while it trains: who has it, what it is of, what is measured."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pyspark.ml import Transformer
from typing_extensions import Self

from hvd_estimators.fitting.feed import EpochFeed
from hvd_estimators.fitting.metadata import ended
from hvd_estimators.fitting.tracking import Tracking
from hvd_estimators.launch.events.stream import Event, Handler, RankEpoch
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.runs import history_text, read_history, run_file
from hvd_estimators.training.spec import EpochMetrics, HistoryRow

__all__ = ["RunRecord"]

logger = logging.getLogger(__name__)

_PATIENCE = 120.0


class RunRecord:
    """Notes one fit of a run, as a context manager around the training of the ranks.

    ``metadata.json`` says that it runs, and in the end how it ended. ``history.json`` is written
    while ranks tell what they measure, and with everything in the end. Neither is worth a training
    run: what cannot be written after its beginning is a warning.

    Parameters
    ----------
    store : Store
        Keeps the run.
    run : RunPaths
        The run.
    document : mapping
        What is noted of it when training begins, see `hvd_estimators.fitting.metadata.begun`.
    goes_on : bool
        Whether an earlier fit has left a history.
    tracking : Tracking, optional
        Gets everything as well.
    """

    def __init__(
        self,
        store: Store,
        run: RunPaths,
        document: Mapping[str, Any],
        goes_on: bool,
        tracking: Tracking | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._document = document
        self._goes_on = goes_on
        self._rows: list[HistoryRow] = []
        self._written = ""
        self._tracking = tracking
        self._feed = EpochFeed(self._take, f"history of run {run.run_id!r}")

    def __enter__(self) -> Self:
        if self._store.saving_runs():
            self._write("metadata", _json(self._document))
            if self._goes_on:
                with self._warned():
                    self._rows = read_history(self._store, self._run.run_path) or []
        if self._tracking is not None:
            self._tracking.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._store.saving_runs():
            self._feed.close(_PATIENCE)
            with self._warned():
                self._write("metadata", _json(ended(self._document, exc, self._store)))
        if self._tracking is not None and exc is not None:
            self._tracking.fail()

    def handler(self, shown: Handler) -> Handler:
        """Return what handles the ranks' events: here, and by another handler."""

        def handle(event: Event) -> None:
            if isinstance(event, RankEpoch):
                rows = [(event.epoch, str(s), str(n), float(v)) for s, n, v in event.rows]
                if self._store.saving_runs():
                    self._feed.put(rows)
                if self._tracking is not None:
                    self._tracking.put(rows)
            shown(event)

        return handle

    def restarted(self, restart: Mapping[str, Any]) -> None:
        """Note that the ranks are launched again."""
        *earlier, fit = self._document["fits"]
        fit = {**fit, "restarts": [*fit.get("restarts", ()), dict(restart)]}
        self._document = {**self._document, "fits": [*earlier, fit]}
        if self._store.saving_runs():
            with self._warned():
                self._write("metadata", _json(self._document))

    def complete(
        self, history: Sequence[EpochMetrics], model: Transformer, stopped: bool = False
    ) -> None:
        """Take what the ranks have returned, and the model that was made of it.

        Parameters
        ----------
        history : sequence of EpochMetrics
            All epochs of the run.
        model : Transformer
            The model.
        stopped : bool
            Whether a callback has stopped the run, in this fit or an earlier one.
        """
        rows = [row for record in history for row in record.rows()]
        if stopped and self._document.get("stopped") == len(history):
            logger.warning(
                "run_id: a callback had stopped the run %r after %d epochs. Its model is returned, "
                "and nothing was trained. To go on, set resume_stopped=True, and change or leave "
                "out what has stopped it; to begin anew, set another run_id.",
                self._run.run_id,
                len(history),
            )
        self._document = {**self._document, "stopped": len(history) if stopped else None}
        if self._store.saving_runs():
            self._feed.close(_PATIENCE)
            with self._warned():
                self._write_rows(rows)
        if self._tracking is not None:
            self._tracking.complete(
                rows, model, self._document["framework"], self._document["versions"]
            )

    def _take(self, rows: Sequence[HistoryRow]) -> None:
        """Note epochs; those that were noted before are trained once more."""
        first = min(row[0] for row in rows)
        self._rows = [*(row for row in self._rows if row[0] < first), *rows]
        self._write_rows(self._rows)

    def _write_rows(self, rows: Sequence[HistoryRow]) -> None:
        text = history_text(rows)
        if text != self._written:
            self._write("history", text)
            self._written = text

    def _write(self, name: str, text: str) -> None:
        self._store.write_text(run_file(self._run.run_path, name), text)

    @contextlib.contextmanager
    def _warned(self) -> Any:
        try:
            yield
        except OSError as error:
            logger.warning("What is noted of run %r is not complete: %s", self._run.run_id, error)


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True)
