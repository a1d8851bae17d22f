"""The driver's record of a run while it trains: owner, identity and measurements.

It holds plain values: no objects, nothing that is secret, and nothing of where the code came from.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from types import TracebackType
from typing import Any

from pyspark.ml import Transformer
from typing_extensions import Self

import hvd_estimators
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import (
    JobCancelledError,
    TrainingInterruptedError,
    WorkerFailedError,
)
from hvd_estimators.fitting.mlflow import Tracking
from hvd_estimators.fitting.progress import EpochFeed
from hvd_estimators.fitting.run import ReadOrder, as_json, named
from hvd_estimators.launch.service.events import Event, Handler, RankEpoch
from hvd_estimators.params import DeclaredParams
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.runs import history_text, read_history, run_file
from hvd_estimators.store.storage_errors import redacted
from hvd_estimators.training.spec import EpochMetrics, HistoryRow

__all__ = ["RunRecord", "end_note", "is_interrupt", "noted_params", "now", "start_note", "versions"]

_PACKAGES = (
    *("horovod", "keras", "lightning", "numpy", "pandas", "petastorm", "pyarrow", "pyspark"),
    *("pytorch-lightning", "tensorflow", "torch", "torchmetrics"),
)


_SECRET = re.compile(r"secret|passw|token(?!iz)|credential|api_?key|access_?key", re.IGNORECASE)


_HIDDEN = "(hidden)"


_MOST_ENTRIES = 100


_MOST_CHARACTERS = 1000


def start_note(
    estimator: DeclaredParams,
    framework: str,
    run: RunPaths,
    order: ReadOrder,
    columns: Sequence[ColumnSpec],
    num_ranks: int,
    before: Mapping[str, Any] | None,
    reading: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what is noted when a fit begins to train.

    Parameters
    ----------
    estimator : DeclaredParams
        Has the params.
    framework : str
        Its kind.
    run : RunPaths
        The run and what it is of.
    order : ReadOrder
        What the order of its rows depends on.
    columns : sequence of ColumnSpec
        The columns that are read.
    num_ranks : int
        Ranks of this fit.
    before : mapping or None
        What an earlier fit has noted of the run, which is kept.
    reading : mapping, optional
        What the order of rows depends on, see `hvd_estimators.fitting.run`.
    """
    fit = {
        "started": now(),
        "state": "running",
        "epochs": estimator.getOrDefault("epochs"),
        "num_ranks": num_ranks,
        "versions": versions(),
        **({} if reading is None else {"reading": as_json(reading)}),
    }
    document = {
        "run_id": run.run_id,
        "framework": framework,
        "fingerprint": as_json(run.fingerprint),
        "row_order": asdict(order),
        "params": noted_params(estimator),
        "columns": [
            {"name": c.name, "kind": c.kind, "dtype": c.dtype, "shape": list(c.shape)}
            for c in columns
        ],
        "versions": fit["versions"],
        "num_ranks": num_ranks,
        "started": fit["started"],
        **(before or {}),
        "state": "running",
        "fits": [*map(_over, (before or {}).get("fits", ())), fit],
    }
    document.pop("ended", None)
    document.pop("error", None)
    return document


def end_note(
    document: Mapping[str, Any], error: BaseException | None, store: Store
) -> dict[str, Any]:
    """Return what is noted when a fit has ended, given what was noted when it began."""
    state: dict[str, Any] = {"state": "finished", "ended": now()}
    if error is not None:
        told: dict[str, Any] = {"class": type(error).__name__, "message": _message(error, store)}
        if isinstance(error, WorkerFailedError):
            # A lost executor, a killed rank and an exception of the user's are this class alike.
            told |= {"cause": error.cause, "rank": error.rank, "host": error.host}
            told["error_type"] = error.error_type or None
        how = "interrupted" if is_interrupt(error) else "failed"
        state = {**state, "state": how, "error": told}
    *earlier, fit = document["fits"]
    return {**document, **state, "fits": [*earlier, {**fit, **state}]}


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error says that somebody wanted a fit to end, and not that it failed."""
    if isinstance(error, WorkerFailedError):
        return error.error_type == TrainingInterruptedError.__name__
    return isinstance(error, (JobCancelledError, KeyboardInterrupt, SystemExit))


def _over(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier fit, which is over, although its driver may not have said so."""
    return {**fit, "state": "interrupted"} if fit["state"] == "running" else dict(fit)


def noted_params(estimator: DeclaredParams) -> dict[str, Any]:
    """Return the params that have a value: plain ones as they are, names of others."""
    values = {name: estimator.getOrDefault(name) for name in estimator._declarations}
    # Variables of an environment are where many keep their keys.
    values["backend_env"] = dict.fromkeys(values.get("backend_env") or (), _HIDDEN) or None
    return {name: _brief(named(v)) for name, v in sorted(values.items()) if v is not None}


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of those that it stands on."""
    found = {"python": sys.version.split()[0], "hvd_estimators": hvd_estimators.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def now() -> str:
    """Return the time, in UTC, as ISO 8601 writes it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def _brief(value: Any) -> Any:
    """Return a value without secrets, and without most of what is too much to read."""
    if isinstance(value, dict):
        return {k: _HIDDEN if _SECRET.search(k) else _brief(v) for k, v in value.items()}
    if isinstance(value, list):
        more = [f"… ({len(value)} in all)"] if len(value) > _MOST_ENTRIES else []
        return [*map(_brief, value[:_MOST_ENTRIES]), *more]
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"{value[:_MOST_CHARACTERS]}…"
    return value


def _message(error: BaseException, store: Store) -> str:
    return str(_brief(redacted(str(error), store.secrets)))


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
        What is noted of it when training begins, see `hvd_estimators.fitting.record.start_note`.
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
                self._write("metadata", _json(end_note(self._document, exc, self._store)))
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
