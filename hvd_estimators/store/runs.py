"""List, read and delete the runs of a store.

``runs/<run_id>/metadata.json`` describes a run, and ``history.json`` contains its metrics. The
driver of a fit rewrites both files completely whenever something changes.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvd_estimators._util.documents import check_types, parse_object, strict_number
from hvd_estimators.exceptions import ParamError, StoreError, did_you_mean
from hvd_estimators.store.checkpoints import CheckpointInfo, list_checkpoints
from hvd_estimators.store.leases import Lease, holder, utc_now
from hvd_estimators.store.paths import StorePaths

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {"epoch": "int64", "stage": "object", "name": "object", "value": "float64"}
"""Columns of a history and their dtypes in pandas."""

_THREADS = 16

# Types of the values of a run's metadata that this package reads.
_METADATA: dict[str, type] = {
    **dict.fromkeys(("run_id", "framework", "state", "started", "ended"), str),
    **dict.fromkeys(("fingerprint", "row_order", "error"), dict),
    "fits": list,
}
_ROW_ORDER: dict[str, type] = {"canonical_shards": int, "random_seed": int, "row_bytes": int}
_ERROR: dict[str, type] = {"class": str, "message": str}
_FIT: dict[str, type] = {"state": str, "reading": dict}

_EARLIEST = datetime.datetime.fromtimestamp(0, datetime.UTC)

Row = tuple[int, str, str, float]


@dataclass(frozen=True)
class RunInfo:
    """Information about a run of a store.

    Attributes
    ----------
    run_id : str
        Name of the run.
    framework : str
        ``"torch"``, ``"keras"``, ``"lightning"``, or the name that a third-party estimator uses.
    state : str
        ``"running"``, ``"finished"``, ``"failed"``, ``"interrupted"`` or ``"damaged"``. A run is
        interrupted if it was asked to stop, or if its driver ended without recording a result. It
        is damaged if its ``metadata.json`` cannot be read.
    started : datetime.datetime
        Start of the training in the run's first fit, in UTC.
    ended : datetime.datetime or None
        End of the newest fit. None if the run is running or the time is unknown.
    epochs : int
        Number of completed epochs.
    metrics : dict of str to float
        Metrics of the newest epoch, with keys such as ``"train/loss"`` or ``"validation/loss"``.
    error : str or None
        Class and message of the error that ended the run, or that makes it damaged.
    path : str
        Folder of the run.
    """

    run_id: str
    framework: str
    state: str
    started: datetime.datetime
    ended: datetime.datetime | None
    epochs: int
    metrics: dict[str, float]
    error: str | None
    path: str


def run_file(run_path: str, name: str) -> str:
    """Return the path of a run's ``"metadata"`` or ``"history"`` file."""
    return f"{run_path}/{name}.json"


def read_metadata(store: StorePaths, run_path: str) -> dict[str, Any] | None:
    """Return the metadata of a run, or None if it has none.

    Raises
    ------
    StoreError
        If the file is damaged.
    """
    path = run_file(run_path, "metadata")
    document = _document(store, path)
    if document is not None:
        try:
            _check_metadata(document)
        except ValueError as error:
            raise _damaged(path, error) from error
    return document


def read_history(store: StorePaths, run_path: str) -> list[Row] | None:
    """Return a run's metrics as (epoch, stage, name, value), or None if there is no history.

    Raises
    ------
    StoreError
        If the file is damaged.
    """
    path = run_file(run_path, "history")
    document = _document(store, path)
    if document is None:
        return None
    try:
        return [(_epoch(e), str(s), str(n), float(v)) for e, s, n, v in document["rows"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, error) from error


def _epoch(value: Any) -> int:
    epoch = int(value)
    if not 0 <= epoch < 2**31:
        raise ValueError(f"{value!r:.100} is not an epoch")
    return epoch


def history_text(rows: Iterable[Row]) -> str:
    """Return the content of ``history.json``: one row per line, infinity and NaN as strings."""
    lines = (json.dumps([*row[:3], strict_number(row[3])]) for row in rows)
    return f'{{"columns": {json.dumps(list(COLUMNS))}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def list_runs(store: StorePaths) -> list[RunInfo]:
    """Return the runs of a store, most recently started first; see `Store.list_runs`."""
    folder = store.get_runs_path()
    paths = [f"{folder}/{name}" for name in store.names(folder)]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        infos = list(threads.map(lambda path: _info(store, path), paths))
    runs = [run for run in infos if run is not None]
    return sorted(runs, key=lambda run: (run.started, run.run_id), reverse=True)


def load_history(store: StorePaths, run_id: str) -> pd.DataFrame:
    """Return the metrics of a run; see `Store.load_history`."""
    import pandas as pd

    run = store.run_paths(run_id)
    rows = read_history(store, run.run_path)
    if rows is None:
        require_run(store, run_id)
        rows = [row for info in list_checkpoints(store, run) for row in _rows_of(info)]
    return pd.DataFrame(rows or [], columns=list(COLUMNS)).astype(COLUMNS)


def delete_run(store: StorePaths, run_id: str) -> None:
    """Delete a run; see `Store.delete_run`."""
    require_run(store, run_id)
    run = store.run_paths(run_id)
    with Lease(store, run):
        store.delete(run.run_path)


def require_run(store: StorePaths, run_id: str) -> None:
    """Check that a run has a folder.

    Raises
    ------
    ParamError
        If it has none. The message suggests a run with a similar name.
    """
    run_path = store.run_paths(run_id).run_path
    if not store.exists(run_path):
        folder = store.get_runs_path()
        raise ParamError(
            f"run_id: {folder!r} has no run {run_id!r}.{did_you_mean(run_id, store.names(folder))}"
        )


def _rows_of(info: CheckpointInfo) -> list[Row]:
    """Return the metrics of a checkpoint's newest epoch, from its manifest."""
    if info.rows:
        return []
    validation = "val_"
    return [
        (
            info.epoch - 1,
            "validation" if name.startswith(validation) else "train",
            name.removeprefix(validation),
            value,
        )
        for name, value in info.metrics.items()
    ]


def _info(store: StorePaths, path: str) -> RunInfo | None:
    """Return information about a run, or None if the folder has no metadata."""
    try:
        metadata = read_metadata(store, path)
    except StoreError as damage:
        name = path.rpartition("/")[2]
        return RunInfo(name, "", "damaged", _EARLIEST, None, 0, {}, str(damage), path)
    if metadata is None:
        return None
    rows = _readable_history(store, path)
    newest = max((row[0] for row in rows), default=-1)
    error = metadata.get("error")
    return RunInfo(
        run_id=metadata["run_id"],
        framework=metadata.get("framework", ""),
        state=_state(store, path, metadata),
        started=_moment(metadata.get("started")) or _EARLIEST,
        ended=_moment(metadata.get("ended")),
        epochs=newest + 1,
        metrics={f"{row[1]}/{row[2]}": row[3] for row in rows if row[0] == newest},
        error=f"{error['class']}: {error['message']}" if error else None,
        path=path,
    )


def _check_metadata(document: Mapping[str, Any]) -> None:
    """Check the types of the values in a run's metadata that this package reads.

    Raises
    ------
    ValueError
        If a value is missing, or is not of its type.
    """
    check_types(document, _METADATA, required=["run_id"])
    for name, types in (("row_order", _ROW_ORDER), ("error", _ERROR)):
        if name in document:
            check_types(document[name], types, required=types)
    if document.get("row_order", {}).get("canonical_shards", 1) < 1:
        raise ValueError("canonical_shards: expected at least 1")
    for fit in document.get("fits", ()):
        check_types(fit, _FIT, required=["state"])
    for name in ("started", "ended"):
        _moment(document.get(name))


def _state(store: StorePaths, path: str, metadata: Mapping[str, Any]) -> str:
    state = str(metadata.get("state", "finished"))
    if state == "running":
        # The folder may be read-only, and another application's.
        return "interrupted" if holder(store, path, utc_now)[1] is None else state
    return state


def _readable_history(store: StorePaths, path: str) -> Sequence[Row]:
    try:
        return read_history(store, path) or ()
    except StoreError:
        return ()


def _document(store: StorePaths, path: str) -> dict[str, Any] | None:
    content = store.read_if_exists(path)
    if content is None:
        return None
    try:
        return parse_object(content)
    except ValueError as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> StoreError:
    return StoreError(f"The file {path!r} is damaged ({type(error).__name__}: {error}). Delete it.")


def _moment(text: str | None) -> datetime.datetime | None:
    """Parse a time; without a time zone, it is in UTC."""
    if text is None:
        return None
    moment = datetime.datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
