"""Runs: identity of data, model and settings, noted beside the checkpoint.

A fit may read with other settings than an earlier one of its run, from an epoch's beginning on.
Within an epoch it must not: rows that were read before would be read again, and others never.

A checkpoint is gone on from only by a fit that is of the same. What that is, is a dict of plain
values, so that an error can tell what differs.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar, overload

from pyspark.ml import Estimator
from pyspark.sql import DataFrame
from typing_extensions import Self

from hvd_estimators._util.to_python import to_python
from hvd_estimators.data.manifest import DatasetManifest, Split
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, ResultsError
from hvd_estimators.fitting.mlflow import Tracking, TrackingRun, active_run
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import boolean, param, string
from hvd_estimators.params.estimator import ColumnParams
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.base import require_store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.leases import FencingToken, Lease
from hvd_estimators.store.paths import Position
from hvd_estimators.store.runs import read_metadata, run_file
from hvd_estimators.training.spec import EpochMetrics, TrainResult
from hvd_estimators.training.weight_digests import named_weights, unequal_weights

__all__ = [
    "Fits",
    "FoundRun",
    "ReadOrder",
    "RunLock",
    "RunParams",
    "RunResults",
    "as_json",
    "check_reading",
    "check_run",
    "data_identity",
    "differences",
    "digest",
    "find_run",
    "named",
    "reading_identity",
]

logger = logging.getLogger(__name__)


def reading_identity(data: DataSpec) -> dict[str, Any]:
    """Return what tells the order of rows from others, but for its seed.

    Files are told by their place, as they have other names whenever data are prepared.
    """
    files: dict[str, int] = {}
    ranges = [
        [
            [files.setdefault(found.file, len(files)), found.row_group, found.start, found.stop]
            for found in shard
        ]
        for shard in data.train_plan.shards
    ]
    options, module = data.options, data.data_module
    return {
        "row groups of the files": digest({"shards": ranges, "open": data.train_plan.open_groups}),
        "shuffle_buffer_size": options.shuffle_buffer_size if options.shuffle else None,
        "inmemory_cache_all": options.shuffle and options.inmemory_cache_all,
        # All of ours read in the same order.
        "data_module": named(module) if isinstance(module, type) else None,
    }


def check_reading(found: FoundRun, data: DataSpec) -> None:
    """Make sure that a run that was interrupted within an epoch finds its rows in the same order.

    Raises
    ------
    ParamError
        If they come in another one.
    """
    if not found.checkpoints:
        return
    newest, run = found.checkpoints[-1], found.run
    if data.num_ranks < data.num_shards:
        logger.info(
            "run_id: the run %r began with %d ranks, whose parts of each global batch the %d of "
            "this fit train on in turn: batches and learning rate stay what they were.",
            *(run.run_id, data.num_shards, data.num_ranks),
        )
    if not newest.rows:
        return
    fits = (found.notes or {}).get("fits") or [{}]
    differing = differences(fits[-1].get("reading", {}), as_json(reading_identity(data)))
    if differing:
        raise ParamError(
            f"run_id: the run {run.run_id!r} was interrupted within epoch {newest.epoch + 1}, and "
            f"this fit reads rows in another order, with {'; '.join(differing)}: some of that "
            "epoch would be trained on twice, and others never. Set what it was trained with, "
            "or another run_id. To begin the epoch anew, delete the run's checkpoints of a "
            f"position within it, from {checkpoint_path(run, newest)!r} backwards."
        )


_OTHER_STATE = re.compile(
    r"model: (?:weights .*|optimizer .*|optimizers: [^:]*\(now with(?:out)?\))"
)


"""Differences of networks and optimizers that cannot load each other's state."""


@dataclass(frozen=True)
class ReadOrder:
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
    def row_order(self) -> ReadOrder | None:
        """The order of rows of a run that is gone on with; None for one that begins.

        None, too, for a run of a version that did not note it.
        """
        order = (self.notes or {}).get("row_order")
        return None if order is None else ReadOrder(**order)


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


class RunLock:
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
        self._lease = Lease(store, run, patient=patient) if store.saving_runs() else None

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

    def fence(self, launch: int) -> FencingToken | None:
        """Return what tells the ranks of a launch, from 0, whether they are still to write.

        Those of earlier launches are not from now on.
        """
        if self._lease is None:
            return None
        if launch:
            self._lease.note_launch(launch)
        return FencingToken(self._lease.path, self._lease.token, launch)

    @property
    def lost(self) -> bool:
        """See `Lease.lost`."""
        return self._lease is not None and self._lease.lost

    def confirm(self) -> None:
        """See `Lease.confirm`."""
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
    value = to_python(value)
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
    return json.loads(json.dumps(to_python(dict(fingerprint)), default=named))


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


class RunParams(Estimator[HorovodModel], ColumnParams):
    """An estimator's ``store`` and ``run_id``, and a run of its own for each fit of a grid."""

    _framework: ClassVar[str]
    """Begins the names of new runs, and says what has written their checkpoints."""

    _run_settings: ClassVar[tuple[str, ...]] = (
        *("feature_cols", "label_cols", "label_shapes", "sample_weight_col"),
        *("learning_rate", "scale_learning_rate", "loss_weights", "gradient_compression"),
        *("batch_size", "train_steps_per_epoch", "backward_passes_per_step"),
        *("random_seed", "shuffle", "transformation_fn", "transformation_batch_fn"),
        *("transformation_edit_fields", "transformation_removed_fields"),
    )
    _optional_run_settings: ClassVar[tuple[str, ...]] = ("outputs",)
    """Settings that a run notes only if they differ from the default: runs of versions without
    them resume."""

    # Its place in a grid, where this is one of the copies that are fitted, which other threads do.
    _grid_index: int | None = None
    _grid_tracking: TrackingRun | None = None

    store = param("Store that keeps datasets, checkpoints and logs. Required.")
    run_id = param(
        "Name of the run; one that the store holds is resumed. Default: a new name.", convert=string
    )

    log_to_mlflow = param(
        "Whether params, what is measured in each epoch, while training goes on, and the fitted "
        "model are logged to the active run of MLflow, where there is one in the thread that calls "
        "fit(). Each fit of a grid gets a run below it, without its model.",
        default=True,
        convert=boolean,
    )

    def _check_run(self) -> None:
        """Check these params as far as that is possible without the store's files.

        Raises
        ------
        ParamError
            If the store is none, or the run's name is no name of a folder.
        """
        store, run_id = self.getOrDefault("store"), self.getOrDefault("run_id")
        require_store(store)
        if run_id is not None:
            store.run_paths(run_id)

    def _fingerprint(self, manifest: DatasetManifest, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a run is of, so that only such fits go on from its checkpoint.

        Not the number of ranks and of epochs, which may be others in a later part of a run.
        """
        defaults = {param.name: value for param, value in self._defaultParamMap.items()}
        optional = [
            name
            for name in self._optional_run_settings
            if self.getOrDefault(name) != defaults.get(name)
        ]
        names = (*self._run_settings, *optional)
        return {
            "data": data_identity(manifest, self._needed_columns()),
            "model": model,
            "settings": {name: named(self.getOrDefault(name)) for name in names},
        }

    def _run_paths(self, prefix: str, fingerprint: Mapping[str, Any]) -> RunPaths:
        """Return the fit's run."""
        get = self.getOrDefault
        run_id = self._new_run_id(prefix)
        if self._grid_index is not None:
            run_id += f"-{digest({**fingerprint, 'grid': self._grid_index})}"
        return replace(get("store").run_paths(run_id), fingerprint=fingerprint)

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, HorovodModel]]:
        """Fit with each of several dicts of params, as Spark's validators do.

        With ``run_id`` each has a run of its own, whose name begins with it and goes on with a
        digest of data, model and settings, so that such a fit, too, can be gone on with.

        Returns
        -------
        iterator
            Of (index, model); threads may share it.
        """
        estimator = self.copy()
        tracking = active_run() if self.getOrDefault("log_to_mlflow") else None

        def fit_one(index: int) -> HorovodModel:
            copied = estimator.copy(paramMaps[index])
            given = {key if isinstance(key, str) else key.name for key in paramMaps[index]}
            if estimator.getOrDefault("run_id") is not None and "run_id" not in given:
                copied._grid_index = index
            copied._grid_tracking = tracking
            return copied.fit(dataset)

        return Fits(fit_one, len(paramMaps))

    def _make_tracking(self, run_id: str, params: Mapping[str, Any]) -> Tracking | None:
        """Return what logs a fit to MLflow; None where there is nothing to log it to."""
        if not self.getOrDefault("log_to_mlflow"):
            return None
        within = self._grid_tracking or active_run()
        if within is None:
            return None
        return Tracking(within, run_id, params, own_run=self._grid_tracking is not None)

    def _new_run_id(self, prefix: str) -> str:
        """Return the run's name: what is set, or one that no other run has."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return self.getOrDefault("run_id") or f"{prefix}_{now}_{uuid.uuid4().hex[:6]}"


class RunResults(Sequence[TrainResult]):
    """The ranks' results, in the order of the ranks. Runs on the driver.

    Parameters
    ----------
    results : sequence of TrainResult
        One per rank; that of rank 0 holds the trained state.
    spec : TrainSpec
        What the ranks were told: the framework's own.
    """

    def __init__(self, results: Sequence[TrainResult], spec: Any) -> None:
        self._results = tuple(results)
        self.spec = spec

    @property
    def state(self) -> Any:
        """What rank 0 trained, once it is certain that the others agree.

        It is bytes, or a `LocalFile` where the framework's trainer returns one.

        Raises
        ------
        HvdEstimatorsError
            If the ranks ended with different weights.
        ResultsError
            If rank 0 returned no state.
        """
        if len({result.weights_digest for result in self._results}) > 1:
            raise HvdEstimatorsError(self._unequal())
        state = self._results[0].state
        if state is None:
            raise ResultsError(
                "Rank 0 returned no trained state. A backend has to return the ranks' results in "
                "the order of the ranks."
            )
        return state

    def _unequal(self) -> str:
        """Return the message about ranks that ended with different weights."""
        names = unequal_weights([result.weight_digests for result in self._results])
        message = "The ranks ended with different weights"
        message += f": {named_weights(names)}. " if names else ". "
        message += (
            "A callback, custom layer or step of the user's that treats ranks differently can "
            "cause that."
        )
        run = getattr(self.spec, "run", None)
        if run is None:
            return message
        if run.checkpoints_path is None:
            return f"{message} Run {run.run_id!r} keeps no checkpoints: its result is lost."
        return (
            f"{message} What rank 0 trained is the newest checkpoint of run {run.run_id!r}, in "
            f"{run.checkpoints_path}: load_checkpoint(store, run_id={run.run_id!r}) reads it."
        )

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """One record per epoch of the whole run."""
        return self._results[0].history

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int) -> TrainResult: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TrainResult]: ...

    def __getitem__(self, index: int | slice) -> TrainResult | Sequence[TrainResult]:
        return self._results[index]
