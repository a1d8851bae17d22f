"""What is noted of a run for people and programs that look at it later. Runs on the driver.

It holds plain values: no objects, nothing that is secret, and nothing of where the code came from.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import hvd_estimators
from hvd_estimators.exceptions import (
    JobCancelledError,
    TrainingInterruptedError,
    WorkerFailedError,
)
from hvd_estimators.fitting.runs import RowOrder, as_json, named
from hvd_estimators.params import DeclaredParams
from hvd_estimators.parquet.manifest import ColumnSpec
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.errors import redacted

__all__ = ["begun", "ended", "is_interrupt", "noted_params", "now", "versions"]

_PACKAGES = (
    *("horovod", "keras", "lightning", "numpy", "pandas", "petastorm", "pyarrow", "pyspark"),
    *("pytorch-lightning", "tensorflow", "torch", "torchmetrics"),
)
_SECRET = re.compile(r"secret|passw|token(?!iz)|credential|api_?key|access_?key", re.IGNORECASE)
_HIDDEN = "(hidden)"
_MOST_ENTRIES = 100
_MOST_CHARACTERS = 1000


def begun(
    estimator: DeclaredParams,
    framework: str,
    run: RunPaths,
    order: RowOrder,
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
    order : RowOrder
        What the order of its rows depends on.
    columns : sequence of ColumnSpec
        The columns that are read.
    num_ranks : int
        Ranks of this fit.
    before : mapping or None
        What an earlier fit has noted of the run, which is kept.
    reading : mapping, optional
        What the order of rows depends on, see `hvd_estimators.fitting.reading_order`.
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


def ended(document: Mapping[str, Any], error: BaseException | None, store: Store) -> dict[str, Any]:
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
