"""Runs: identity, lookup in the store, lock, params and results.

A run's fingerprint is the identity of its data, model and settings. It is stored beside the
checkpoints. Only a fit with an equal fingerprint can resume a run. The fingerprint is a dict of
plain values, so that an error message can name the differences.

A fit can use other reader settings than an earlier fit of its run, if it resumes at the start of an
epoch. Within an epoch, other settings are not allowed: some rows would be read twice, and others
never. Runs on the driver.
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
from hvd_estimators.prepare.datasets import SharedDatasets
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.base import require_store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.leases import FencingToken, Lease
from hvd_estimators.store.paths import Position
from hvd_estimators.store.runs import read_metadata, run_file
from hvd_estimators.training.spec import EpochMetrics, TrainResult, named_weights, unequal_weights

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
    """Return the identity of the row order, without its seed.

    Files are identified by their position, because their names change when data are prepared again.
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
        # All data modules of this package read in the same order.
        "data_module": named(module) if isinstance(module, type) else None,
    }


def check_reading(found: FoundRun, data: DataSpec) -> None:
    """Check that a run that was interrupted within an epoch reads rows in the same order.

    Raises
    ------
    ParamError
        If the order differs.
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
            "or another run_id. To repeat the epoch from its start, delete the run's checkpoints "
            f"of a position within it, from {checkpoint_path(run, newest)!r} backwards."
        )


_OTHER_STATE = re.compile(
    r"model: (?:weights .*|optimizer .*|optimizers: [^:]*\(now with(?:out)?\))"
)


"""Differences between models or optimizers that cannot load each other's state."""


@dataclass(frozen=True)
class ReadOrder:
    """Settings that determine the row order for given data, fixed when the run starts.

    Attributes
    ----------
    canonical_shards : int
        Number of shards into which the rows are split: the run's initial number of ranks.
    random_seed : int
        Seed of the order, set by the user or drawn at random.
    """

    canonical_shards: int
    random_seed: int


@dataclass(frozen=True)
class FoundRun:
    """Content of a run in the store before a fit.

    Attributes
    ----------
    run : RunPaths
        The run.
    checkpoints : tuple of Position
        Checkpoints of the run.
    notes : mapping or None
        The run's metadata record. None if there is no record, or if there are no checkpoints.
    """

    run: RunPaths
    checkpoints: tuple[Position, ...] = ()
    notes: Mapping[str, Any] | None = None

    @property
    def row_order(self) -> ReadOrder | None:
        """Row order of a resumed run; None for a new run.

        Also None if the run comes from a version that did not record the row order.
        """
        order = (self.notes or {}).get("row_order")
        return None if order is None else ReadOrder(**order)


def find_run(store: Store, run: RunPaths) -> FoundRun:
    """Look up a run in the store."""
    found = tuple(positions(store, run))
    return FoundRun(run, found, read_metadata(store, run.run_path) if found else None)


def check_run(found: FoundRun) -> None:
    """Check that a run's checkpoints, if any, have the fingerprint of the fit.

    Checkpoints without a record come from an earlier version. Such a run is resumed with a warning,
    because the user named the run explicitly.

    Raises
    ------
    ParamError
        If the checkpoints are from other data, another model or other settings.
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
    """Return advice other than a new run_id, depending on whether the checkpoints can load."""
    if any(map(_OTHER_STATE.fullmatch, differing)):
        return (
            "The checkpoints hold weights and optimizer state of the other network, which this one "
            f"cannot load. To begin with some of its weights, load them into the model by "
            f"load_checkpoint(store, run_id={run.run_id!r}) and fit with another run_id."
        )
    path = run_file(run.run_path, "metadata")
    return f"To resume it all the same, delete {path!r}."


class RunLock:
    """Lock that keeps the fits of all processes from using a run until the block ends.

    Parameters
    ----------
    store : Store
        The store that holds the run. If the store saves no runs, the lock has no effect.
    run : RunPaths
        The run.
    patient : bool
        Whether to wait if the other fit may have been killed.

    Raises
    ------
    ParamError
        If another fit holds the lock.
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
        """Return the token that allows the ranks of a launch, counted from 0, to write.

        From now on, ranks of earlier launches must not write. Returns None if the store saves no
        runs.
        """
        if self._lease is None:
            return None
        if launch:
            self._lease.note_launch(launch)
        return FencingToken(self._lease.path, self._lease.token, launch)

    @property
    def lost(self) -> bool:
        """True after another process has taken over the run, see `Lease.lost`."""
        return self._lease is not None and self._lease.lost

    def confirm(self) -> None:
        """Confirm the run's lease, see `Lease.confirm`."""
        if self._lease is not None:
            self._lease.confirm()


def digest(fingerprint: Mapping[str, Any]) -> str:
    """Return a short hash of a fingerprint: 12 hexadecimal digits."""
    document = json.dumps(as_json(fingerprint), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:12]


def data_identity(manifest: DatasetManifest, columns: Sequence[str]) -> dict[str, Any]:
    """Return the identity of a dataset: its columns, its numbers of rows, and its content.

    Prepared data have a checksum of their rows, which stays the same when they are prepared again.
    Other data are identified by their row groups and the file names relative to their folder.
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
    """Return a value that JSON can hold, with names in place of functions, classes and objects."""
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
    """Thread-safe iterator that runs one fit per step and returns its index and model.

    Parameters
    ----------
    fit : callable
        Runs the fit with a given index and returns its model.
    number : int
        Number of fits.
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
    """Return a fingerprint as it is after a JSON round trip."""
    return json.loads(json.dumps(to_python(dict(fingerprint)), default=named))


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the differences between the entries that both have, old value before new value."""
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
    """Params of an estimator's run, with a separate run for each fit of a grid."""

    _framework: ClassVar[str]
    """Prefix of the names of new runs, and the framework that writes their checkpoints."""

    _run_settings: ClassVar[tuple[str, ...]] = (
        *("feature_cols", "label_cols", "label_shapes", "sample_weight_col"),
        *("learning_rate", "scale_learning_rate", "loss_weights", "gradient_compression"),
        *("batch_size", "train_steps_per_epoch", "backward_passes_per_step"),
        *("random_seed", "shuffle", "transformation_fn", "transformation_batch_fn"),
        *("transformation_edit_fields", "transformation_removed_fields"),
    )
    _optional_run_settings: ClassVar[tuple[str, ...]] = ("outputs",)
    """Settings that a run records only if they differ from the default.

    Runs of versions without these settings can therefore be resumed.
    """

    # Index of this copy in a grid, the MLflow run of the thread that called `fitMultiple`, and the
    # data that the grid's fits share. Other threads fit the copies.
    _grid_index: int | None = None
    _grid_tracking: TrackingRun | None = None
    _shared_data: SharedDatasets | None = None

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
        """Check ``store`` and ``run_id`` without reading files of the store.

        Raises
        ------
        ParamError
            If ``store`` is not a store, or ``run_id`` is not a valid folder name.
        """
        store, run_id = self.getOrDefault("store"), self.getOrDefault("run_id")
        require_store(store)
        if run_id is not None:
            store.run_paths(run_id)

    def _fingerprint(self, manifest: DatasetManifest, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's fingerprint; only fits with an equal fingerprint can resume it.

        The fingerprint omits the numbers of ranks and epochs, which can differ in later fits of
        a run.
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
        """Return the paths of the fit's run, with its fingerprint."""
        get = self.getOrDefault
        run_id = self._new_run_id(prefix)
        if self._grid_index is not None:
            run_id += f"-{digest({**fingerprint, 'grid': self._grid_index})}"
        return replace(get("store").run_paths(run_id), fingerprint=fingerprint)

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Any, Any]]
    ) -> Iterator[tuple[int, HorovodModel]]:
        """Fit once per param map; Spark's validators call this method.

        Fits that need the same columns with the same options share one written dataset.

        With ``run_id``, each fit has a separate run, unless its param map sets ``run_id``. The name
        of that run is ``run_id`` and a digest of data, model, settings and index, so that the fit
        can be resumed.

        Returns
        -------
        iterator
            Iterator over (index, model). It is thread-safe.
        """
        estimator = self.copy()
        tracking = active_run() if self.getOrDefault("log_to_mlflow") else None
        shared = SharedDatasets(len(paramMaps))

        def fit_one(index: int) -> HorovodModel:
            copied = estimator.copy(paramMaps[index])
            given = {key if isinstance(key, str) else key.name for key in paramMaps[index]}
            if estimator.getOrDefault("run_id") is not None and "run_id" not in given:
                copied._grid_index = index
            copied._grid_tracking = tracking
            copied._shared_data = shared
            with shared.fit():
                return copied.fit(dataset)

        return Fits(fit_one, len(paramMaps))

    def _make_tracking(self, run_id: str, params: Mapping[str, Any]) -> Tracking | None:
        """Return the MLflow logger of a fit, or None if it is off or has no MLflow run."""
        if not self.getOrDefault("log_to_mlflow"):
            return None
        within = self._grid_tracking or active_run()
        if within is None:
            return None
        return Tracking(within, run_id, params, own_run=self._grid_tracking is not None)

    def _new_run_id(self, prefix: str) -> str:
        """Return ``run_id`` if it is set, or a new unique name."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return self.getOrDefault("run_id") or f"{prefix}_{now}_{uuid.uuid4().hex[:6]}"


class RunResults(Sequence[TrainResult]):
    """Results of the ranks, in the order of the ranks.

    Parameters
    ----------
    results : sequence of TrainResult
        One result per rank. The result of rank 0 holds the trained state.
    spec : TrainSpec
        The ranks' spec, of the framework's own class.
    """

    def __init__(self, results: Sequence[TrainResult], spec: Any) -> None:
        self._results = tuple(results)
        self.spec = spec

    @property
    def state(self) -> Any:
        """Trained state from rank 0, after a check that all ranks have equal weights.

        It is bytes, or a `LocalFile` if the framework's trainer returns one.

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
        """Metrics of the whole run, with one record per epoch."""
        return self._results[0].history

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, index: int) -> TrainResult: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TrainResult]: ...

    def __getitem__(self, index: int | slice) -> TrainResult | Sequence[TrainResult]:
        return self._results[index]
