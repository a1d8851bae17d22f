"""The driver's record of a run: params, identity, status and metrics of its fits.

A record holds only plain values: no objects, no secrets, and no information on the origin of the
code. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

from pyspark.ml import Transformer

import hvd_estimators
from hvd_estimators._util.documents import to_python
from hvd_estimators.data.arrays import Columns
from hvd_estimators.exceptions import JobCancelledError, TrainingInterruptedError, WorkerFailedError
from hvd_estimators.fitting.fingerprint import as_json, named, reading_identity
from hvd_estimators.fitting.mlflow import MlflowLogger
from hvd_estimators.fitting.run import ReadOrder, Run
from hvd_estimators.fitting.run_loggers import CallQueue, RunLoggers
from hvd_estimators.launch.horovod_build import installed_version
from hvd_estimators.launch.service.events import Event, Handler, RankEpoch
from hvd_estimators.params import DeclaredParams
from hvd_estimators.store import Store
from hvd_estimators.store.redaction import redacted
from hvd_estimators.store.runs import history_text, read_history, run_file
from hvd_estimators.training.spec import (
    EpochMetrics,
    HistoryRow,
    TrainSpec,
    measured,
    measured_rows,
)

logger = logging.getLogger(__name__)

_PACKAGES = (
    *("horovod", "keras", "lightning", "numpy", "pandas", "petastorm", "pyarrow", "pyspark"),
    *("pytorch-lightning", "tensorflow", "torch", "torchmetrics"),
)
_SECRET = re.compile(r"secret|passw|token(?!iz)|credential|api_?key|access_?key", re.IGNORECASE)
_HIDDEN = "(hidden)"
_NOT_COMPARED = {"backend_env", "run_id", "store", "verbose"}
"""Params that are not hyperparameters."""
_MOST_ENTRIES = 100
_MOST_CHARACTERS = 1000
_SECONDS_BETWEEN = 1.0
_CLOSE_SECONDS = 120.0
"""Maximum wait for the history to be written at the end of a fit."""


def start_record(estimator: DeclaredParams, run: Run, spec: TrainSpec) -> dict[str, Any]:
    """Return the record at the start of training; values of earlier fits of the run are preserved.

    Parameters
    ----------
    estimator : DeclaredParams
        The estimator.
    run : Run
        The run, with its metadata of earlier fits.
    spec : TrainSpec
        The ranks' configuration.
    """
    data, before = spec.data, run.metadata or {}
    fit = {
        "started": now(),
        "state": "running",
        "epochs": estimator.getOrDefault("epochs"),
        "num_ranks": data.num_ranks,
        "versions": versions(),
        "reading": as_json(reading_identity(data)),
    }
    document = {
        "run_id": run.paths.run_id,
        "framework": spec.checkpoints.framework,
        "fingerprint": as_json(run.paths.fingerprint),
        "row_order": asdict(
            ReadOrder(data.num_shards, data.random_seed, data.train_plan.row_bytes)
        ),
        "params": recorded_params(estimator),
        "columns": [
            {"name": c.name, "kind": c.kind, "dtype": c.dtype, "shape": list(c.shape)}
            for c in data.columns
        ],
        "versions": fit["versions"],
        "num_ranks": data.num_ranks,
        "started": fit["started"],
        **before,
        "state": "running",
        "fits": [*map(_over, before.get("fits", ())), fit],
    }
    document.pop("ended", None)
    document.pop("error", None)
    return document


def end_record(
    document: Mapping[str, Any], error: BaseException | None, store: Store
) -> dict[str, Any]:
    """Return the record at the end of a fit, given the record at its start."""
    state: dict[str, Any] = {"state": "finished", "ended": now()}
    if error is not None:
        message = str(_brief(redacted(str(error), store.secrets)))
        details: dict[str, Any] = {"class": type(error).__name__, "message": message}
        if isinstance(error, WorkerFailedError):
            # Lost executors, killed ranks and exceptions from user code all have this class.
            details |= {"cause": error.cause, "rank": error.rank, "host": error.host}
            details["error_type"] = error.error_type or None
        state |= {"state": end_state(error), "error": details}
    *earlier, fit = document["fits"]
    return {**document, **state, "fits": [*earlier, {**fit, **state}]}


def end_state(error: BaseException) -> str:
    """Return ``"interrupted"`` for a fit that was stopped on purpose, else ``"failed"``."""
    if isinstance(error, WorkerFailedError):
        is_interrupt = error.error_type == TrainingInterruptedError.__name__
    else:
        is_interrupt = isinstance(error, (JobCancelledError, KeyboardInterrupt, SystemExit))
    return "interrupted" if is_interrupt else "failed"


def _over(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier fit's entry with an end state, even if its driver did not write one."""
    return {**fit, "state": "interrupted"} if fit["state"] == "running" else dict(fit)


def recorded_params(estimator: DeclaredParams, *, only_set: bool = False) -> dict[str, Any]:
    """Return the params that are not None; values that JSON cannot hold become names.

    With ``only_set``, defaults are omitted.
    """
    names = [n for n in estimator._declarations if not only_set or estimator.isSet(n)]
    values = {name: estimator.getOrDefault(name) for name in names}
    # Environment variables often contain credentials.
    values["backend_env"] = dict.fromkeys(values.get("backend_env") or (), _HIDDEN) or None
    return {name: _brief(named(v)) for name, v in sorted(values.items()) if v is not None}


def hyperparameters(
    estimator: DeclaredParams, learning_rates: Sequence[float]
) -> dict[str, bool | int | float | str]:
    """Return the numbers, strings and booleans among the params that are set.

    Those in dicts have names such as ``model_args/hidden``. Secrets are omitted.

    Parameters
    ----------
    estimator : DeclaredParams
        The estimator.
    learning_rates : sequence of float
        The optimizer's rates. A single rate is a hyperparameter even if no param sets it.
    """
    rates = set(learning_rates)
    found: dict[str, Any] = {"learning_rate": rates.pop()} if len(rates) == 1 else {}
    names = [name for name in estimator._declarations if estimator.isSet(name)]
    for name in sorted({*names} - _NOT_COMPARED):
        value = to_python(estimator.getOrDefault(name))
        entries = {name: value}
        if isinstance(value, Mapping):
            entries = {f"{name}/{k}": v for k, v in value.items() if not _SECRET.search(str(k))}
        found |= {
            k: _brief(v) for k, v in entries.items() if isinstance(v, (bool, int, float, str))
        }
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and its installed dependencies."""
    found = {package: installed_version(package) for package in _PACKAGES}
    return {
        "python": sys.version.split()[0],
        "hvd_estimators": hvd_estimators.__version__,
        **{name: version for name, version in found.items() if version},
    }


def now() -> str:
    """Return the current time in UTC in ISO 8601 format."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _brief(value: Any) -> Any:
    """Return a value with secrets hidden and long strings and lists truncated."""
    if isinstance(value, dict):
        return {k: _HIDDEN if _SECRET.search(k) else _brief(v) for k, v in value.items()}
    if isinstance(value, list):
        more = [f"… ({len(value)} in all)"] if len(value) > _MOST_ENTRIES else []
        return [*map(_brief, value[:_MOST_ENTRIES]), *more]
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"{value[:_MOST_CHARACTERS]}…"
    return value


class RunRecord:
    """Context manager that records and logs one fit of a run while the ranks train.

    ``metadata.json`` contains the state of the fit: running, then how it ended. ``history.json`` is
    updated when ranks report metrics, and completed at the end. After the start, a failed write of
    either file only causes a warning, because it must not end the training. After another process
    has taken over the run, neither file is written.

    Parameters
    ----------
    run : Run
        The run.
    document : mapping
        The record at the start of training, see `start_record`.
    loggers : RunLoggers
        The fit's loggers, which get the same metrics.
    mlflow : MlflowLogger, optional
        The one among them that gets the model.
    """

    def __init__(
        self,
        run: Run,
        document: Mapping[str, Any],
        loggers: RunLoggers,
        mlflow: MlflowLogger | None = None,
    ) -> None:
        self._run = run
        self._store = run.store
        self._document = document
        self._rows: list[HistoryRow] = []
        self._written = ""
        self._loggers = loggers
        self._mlflow = mlflow
        self._history = CallQueue(f"history of run {run.paths.run_id!r}")
        self._next_write = 0.0
        self._has_warned = self._is_complete = False

    def __enter__(self) -> Self:
        try:
            self._loggers.start()
            if self._store.saving_runs():
                self._write("metadata", _json(self._document))
                if self._run.checkpoints:
                    with self._warned():
                        self._rows = read_history(self._store, self._run.paths.run_path) or []
        except BaseException as error:
            self._loggers.finish(end_state(error))
            raise
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._store.saving_runs():
            if not self._is_complete:
                self._end_history(self._rows)
            with self._warned():
                self._write("metadata", _json(end_record(self._document, exc, self._store)))
        self._loggers.finish("finished" if exc is None else end_state(exc))

    def handler(self, shown: Handler) -> Handler:
        """Return a handler that records the ranks' metrics and then calls another handler."""

        def handle(event: Event) -> None:
            if isinstance(event, RankEpoch):
                rows = [(event.epoch, str(s), str(n), float(v)) for s, n, v in event.rows]
                if self._store.saving_runs():
                    self._add(rows)
                self._loggers.log({event.epoch: {**event.rates, **measured_rows(event.rows)}})
            shown(event)

        return handle

    def restarted(self, restart: Mapping[str, Any]) -> None:
        """Record that the ranks are relaunched."""
        *earlier, fit = self._document["fits"]
        fit = {**fit, "restarts": [*fit.get("restarts", ()), dict(restart)]}
        self._document = {**self._document, "fits": [*earlier, fit]}
        if self._store.saving_runs():
            self._run.beat()
            with self._warned():
                self._write("metadata", _json(self._document))

    def complete(
        self,
        history: Sequence[EpochMetrics],
        model: Transformer,
        stopped: bool = False,
        rows: Callable[[], Columns | None] = lambda: None,
    ) -> None:
        """Record the ranks' results and the fitted model.

        Parameters
        ----------
        history : sequence of EpochMetrics
            All epochs of the run.
        model : Transformer
            The fitted model.
        stopped : bool
            Whether a callback has stopped the run, in this fit or an earlier one.
        rows : callable
            Returns training rows for MLflow's input example.
        """
        metrics = [row for record in history for row in record.rows()]
        if stopped and self._document.get("stopped") == len(history):
            logger.warning(
                "run_id: a callback stopped the run %r after %d epochs. fit() returns its model "
                "without training. To resume the run, set resume_stopped=True, and change or leave "
                "out the callback. For a new run, set another run_id.",
                self._run.paths.run_id,
                len(history),
            )
        self._document = {**self._document, "stopped": len(history) if stopped else None}
        if self._store.saving_runs():
            self._is_complete = True
            self._end_history(metrics)
        # Events do not arrive for certain, and a logger may have failed.
        done = self._run.epochs_done
        self._loggers.log({r.epoch: measured(r) for r in history[done:]})
        if self._mlflow is not None and self._loggers.wait_for(self._mlflow):
            self._mlflow.log_model(model, rows, len(history) - 1)

    def _add(self, rows: Sequence[HistoryRow]) -> None:
        """Record epochs; retrained epochs replace recorded epochs from the first one on."""
        first = min((row[0] for row in rows), default=math.inf)
        self._rows = [*(row for row in self._rows if row[0] < first), *rows]
        self._history.put(self._write_history)

    def _write_history(self) -> None:
        """Write the newest rows, at most once per second; runs in another thread."""
        if time.monotonic() < self._next_write:
            return
        try:
            self._write_rows(self._rows)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "history of run %r: metrics could not be written (%s: %s). They are written "
                    "later if possible; training continues.",
                    *(self._run.paths.run_id, type(error).__name__, redacted(str(error))),
                )
        self._next_write = time.monotonic() + _SECONDS_BETWEEN

    def _end_history(self, rows: Sequence[HistoryRow]) -> None:
        self._history.close()
        self._history.join(_CLOSE_SECONDS)
        self._run.beat()
        # Without checkpoints, a history is of a training that the user has deleted.
        if rows or self._is_complete or not self._run.checkpoints:
            with self._warned():
                self._write_rows(rows)

    def _write_rows(self, rows: Sequence[HistoryRow]) -> None:
        text = history_text(rows)
        if text != self._written:
            self._write("history", text)
            self._written = text

    def _write(self, name: str, text: str) -> None:
        if not self._run.lost:
            self._store.write_text(run_file(self._run.paths.run_path, name), text)

    @contextlib.contextmanager
    def _warned(self) -> Any:
        try:
            yield
        except OSError as error:
            logger.warning("The record of run %r is incomplete: %s", self._run.paths.run_id, error)


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True)
