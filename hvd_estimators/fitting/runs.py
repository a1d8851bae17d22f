"""What a run is of: its data, model and settings, noted beside its checkpoint. Runs on the driver.

A checkpoint is gone on from only by a fit that is of the same. What that is, is a dict of plain
values, so that an error can tell what differs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hvd_estimators.exceptions import ParamError
from hvd_estimators.parquet.manifest import DatasetManifest, Split
from hvd_estimators.plain import plain
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.checkpoint_names import Position
from hvd_estimators.store.checkpoints import positions
from hvd_estimators.store.fence import Fence
from hvd_estimators.store.lease import RunLease
from hvd_estimators.store.runs import read_metadata, run_file

__all__ = [
    "Fits",
    "FoundRun",
    "HeldRun",
    "RowOrder",
    "as_json",
    "check_run",
    "data_identity",
    "differences",
    "digest",
    "find_run",
    "named",
]

logger = logging.getLogger(__name__)

_OTHER_STATE = re.compile(
    r"model: (?:weights .*|optimizer .*|optimizers: [^:]*\(now with(?:out)?\))"
)
"""Differences of networks and optimizers that cannot load each other's state."""


@dataclass(frozen=True)
class RowOrder:
    """What the order of a run's rows depends on beside its data: fixed when the run begins.

    Attributes
    ----------
    canonical_shards : int
        Shards into which the rows are cut: the number of ranks with which the run began.
    random_seed : int
        Seed of the order: the user's, or what was drawn.
    """

    canonical_shards: int
    random_seed: int


@dataclass(frozen=True)
class FoundRun:
    """What the store holds of a run, as it was found before a fit.

    Attributes
    ----------
    run : RunPaths
        The run.
    checkpoints : tuple of Position
        Its checkpoints.
    notes : mapping or None
        What was noted beside them; None if nothing was, or if there are none.
    """

    run: RunPaths
    checkpoints: tuple[Position, ...] = ()
    notes: Mapping[str, Any] | None = None

    @property
    def row_order(self) -> RowOrder | None:
        """The order of rows of a run that is gone on with; None for one that begins.

        None, too, for a run of a version that did not note it.
        """
        order = (self.notes or {}).get("row_order")
        return None if order is None else RowOrder(**order)


def find_run(store: Store, run: RunPaths) -> FoundRun:
    """Look for a run in the store."""
    found = tuple(positions(store, run))
    return FoundRun(run, found, read_metadata(store, run.run_path) if found else None)


def check_run(found: FoundRun) -> None:
    """Make sure that a run's checkpoints, where there are any, are of the same as a fit.

    Those of a version that noted nothing are gone on from, with a warning: it was asked for by
    name.

    Raises
    ------
    ParamError
        If they are of other data, another model or other settings.
    """
    run, notes = found.run, found.notes
    if not found.checkpoints:
        return
    if notes is None:
        logger.warning(
            "run_id: the checkpoint of %r does not say what it was trained on and with (there is "
            "no %s). It is gone on from unchecked.",
            run.run_id,
            run_file(run.run_path, "metadata"),
        )
        return
    differing = differences(notes.get("fingerprint", {}), as_json(run.fingerprint))
    if differing:
        raise ParamError(
            f"run_id: the store holds a run {run.run_id!r} that this fit cannot resume. It was "
            f"trained with {'; '.join(differing)}. Set another run_id (or none: each fit then "
            f"has a run of its own), or what it was trained with. {_advice(differing, run)}"
        )


def _advice(differing: Sequence[str], run: RunPaths) -> str:
    """Return what helps beside another run_id: that depends on whether the checkpoints fit."""
    if any(map(_OTHER_STATE.fullmatch, differing)):
        return (
            "The checkpoints hold weights and optimizer state of the other network, which this one "
            f"cannot load. To begin with some of its weights, load them into the model by "
            f"load_checkpoint(store, run_id={run.run_id!r}) and fit with another run_id."
        )
    path = run_file(run.run_path, "metadata")
    return f"To resume it all the same, delete {path!r}."


class HeldRun:
    """Keeps other fits from a run until the block ends: those of all processes.

    Parameters
    ----------
    store : Store
        Keeps the run. Where it keeps no runs there is nothing to keep others from.
    run : RunPaths
        The run.
    patient : bool
        Whether to wait where the other fit may have been killed.

    Raises
    ------
    ParamError
        If another fit has it.
    """

    def __init__(self, store: Store, run: RunPaths, *, patient: bool = False) -> None:
        self._store = store
        self._run = run
        self._lease = RunLease(store, run, patient=patient) if store.saving_runs() else None

    def __enter__(self) -> Self:
        if self._lease is not None:
            self._lease.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._lease is not None:
            self._lease.__exit__(exc_type, exc, traceback)
        if self._lease is None or exc is not None:
            try:
                self._store.delete_empty(self._run.run_path)
            except OSError as error:
                logger.warning("What a fit has left could not be deleted: %s", error)

    def fence(self, launch: int) -> Fence | None:
        """Return what tells the ranks of a launch, from 0, whether they are still to write.

        Those of earlier launches are not from now on.
        """
        if self._lease is None:
            return None
        if launch:
            self._lease.note_launch(launch)
        return Fence(self._lease.path, self._lease.token, launch)

    @property
    def lost(self) -> bool:
        """See `RunLease.lost`."""
        return self._lease is not None and self._lease.lost

    def confirm(self) -> None:
        """See `RunLease.confirm`."""
        if self._lease is not None:
            self._lease.confirm()


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Return a few characters that are others for another fingerprint."""
    document = json.dumps(as_json(fingerprint), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:12]


def data_identity(manifest: DatasetManifest, columns: Sequence[str]) -> dict[str, Any]:
    """Return what tells a dataset from others: its columns, and its rows as far as they are known.

    Prepared data has a sum over its rows, which is the same however often they are prepared. That
    of others is told by the names of files below their folder, and their row groups.
    """
    specs = [spec for spec in manifest.columns if spec.name in columns]
    specs.sort(key=lambda spec: columns.index(spec.name))
    identity: dict[str, Any] = {
        "columns": [[spec.name, spec.kind, spec.dtype, list(spec.shape)] for spec in specs],
        "training rows": manifest.train.rows,
        "validation rows": manifest.validation.rows if manifest.validation else 0,
    }
    if manifest.content is not None:
        return {**identity, "content of the rows": manifest.content}
    splits = [manifest.train, *([manifest.validation] if manifest.validation else [])]
    return {**identity, "files": digest({"splits": [_files(split) for split in splits]})}


def named(value: Any) -> Any:
    """Return what a value that JSON cannot hold is told by: names of functions and of classes."""
    value = plain(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): named(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [named(entry) for entry in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


class Fits:
    """The models of several fits, as threads ask for them.

    Parameters
    ----------
    fit : callable
        Of the fit's index.
    number : int
        How many there are.
    """

    def __init__(self, fit: Callable[[int], Any], number: int) -> None:
        self._fit = fit
        self._indices = iter(range(number))
        self._lock = threading.Lock()

    def __iter__(self) -> Fits:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._lock:
            index = next(self._indices)
        return index, self._fit(index)


def _files(split: Split) -> list[Any]:
    return [
        [group.file.removeprefix(split.path), group.index, group.rows, group.open_bytes]
        for group in split.row_groups
    ]


def as_json(fingerprint: Mapping[str, Any]) -> Any:
    """Return a fingerprint as it is found again in a file."""
    return json.loads(json.dumps(plain(dict(fingerprint)), default=named))


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what differs, the old before the new, among what both tell."""
    told = []
    for name in wanted.keys() & found.keys():
        old, new = found[name], wanted[name]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            told += [f"{name}: {difference}" for difference in differences(old, new)]
            told += [f"{name}: {key} (now without)" for key in old.keys() - new.keys()]
            told += [f"{name}: no {key} (now with)" for key in new.keys() - old.keys()]
        elif json.dumps(old) != json.dumps(new):
            told.append(f"{name} {_short(old)} (now {_short(new)})")
    return sorted(told)


def _short(value: Any) -> str:
    text = re.sub(r"\s+", " ", value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 120 else f"{text[:80]}… ({digest({'value': value})})"
