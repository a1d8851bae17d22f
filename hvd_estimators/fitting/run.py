"""Runs: lookup in the store, lease, params and results.

A fit can use other reader settings than an earlier fit of its run, if it resumes at the start of an
epoch. Within an epoch, other settings are not allowed: some rows would be read twice, and others
never. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar, Self

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, ResultsError
from hvd_estimators.fitting.fingerprint import (
    as_json,
    data_identity,
    differences,
    digest,
    named,
    reading_identity,
)
from hvd_estimators.fitting.mlflow import MlflowLogger, TrackingRun, active_run
from hvd_estimators.fitting.stores import default_store
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import boolean, param, string
from hvd_estimators.params.estimator import ColumnParams
from hvd_estimators.prepare.datasets import SharedDatasets
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.base import as_store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.leases import FencingToken, Lease
from hvd_estimators.store.paths import Position, orphans
from hvd_estimators.store.runs import read_metadata, run_file
from hvd_estimators.training.spec import EpochMetrics, TrainResult, named_weights, unequal_weights

logger = logging.getLogger(__name__)

# Differences between models or optimizers that cannot load each other's state.
_OTHER_STATE = re.compile(
    r"model: (?:weights .*|optimizer .*|optimizers: [^:]*\(now with(?:out)?\))"
)


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


class Run:
    """A fit's run in the store, and the lease that keeps other fits from using it.

    As a context manager, it holds the run's lease. A store that saves no runs needs no lease.

    Parameters
    ----------
    store : Store
        The store that holds the run.
    paths : RunPaths
        Paths of the run, with the fingerprint of this fit.
    patient : bool
        Whether to wait for the lease if the other fit may have been killed.

    Attributes
    ----------
    store, paths
        As given.
    checkpoints : tuple of Position
        The run's checkpoints before this fit; see `load`.
    metadata : mapping or None
        The run's metadata before this fit. None if there is none, or if there are no checkpoints.

    Raises
    ------
    ParamError
        By the block, if another fit holds the lease.
    """

    def __init__(self, store: Store, paths: RunPaths, *, patient: bool = False) -> None:
        self.store = store
        self.paths = paths
        self.checkpoints: tuple[Position, ...] = ()
        self.metadata: Mapping[str, Any] | None = None
        self._lease = Lease(store, paths, patient=patient) if store.saving_runs() else None

    def __enter__(self) -> Self:
        if self._lease is not None:
            self._lease.__enter__()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if self._lease is not None:
            self._lease.__exit__()
        if self._lease is None or exc is not None:
            with self._logged("The empty folder of run %r could not be deleted: %s"):
                self.store.delete_empty(self.paths.run_path)

    def require_free(self) -> None:
        """Check that no other fit holds the lease; see `Lease.require_free`."""
        if self._lease is not None:
            self._lease.require_free()

    def load(self) -> Self:
        """Read the run's checkpoints and metadata from the store."""
        self.checkpoints = tuple(positions(self.store, self.paths))
        if self.checkpoints:
            self.metadata = read_metadata(self.store, self.paths.run_path)
        return self

    @property
    def newest(self) -> Position | None:
        """Newest checkpoint before this fit; None for a new run."""
        return max(self.checkpoints, default=None)

    @property
    def epochs_done(self) -> int:
        """Number of epochs that were complete before this fit."""
        return self.newest.epoch if self.newest is not None else 0

    @property
    def row_order(self) -> ReadOrder | None:
        """Row order of a resumed run; None for a new run, and if its record was deleted."""
        order = (self.metadata or {}).get("row_order")
        if order is None:
            return None
        # A later version may record more.
        return ReadOrder(order["canonical_shards"], order["random_seed"])

    def check_fingerprint(self) -> None:
        """Check that the run's checkpoints, if any, have the fingerprint of this fit.

        A run whose record the user has deleted is resumed with a warning.

        Raises
        ------
        ParamError
            If the checkpoints are from other data, another model or other settings.
        """
        if not self.checkpoints:
            return
        run_id = self.paths.run_id
        if self.metadata is None:
            logger.warning(
                "run_id: resuming %r without a check: its data, model and settings are unknown, "
                "because %s is missing.",
                run_id,
                run_file(self.paths.run_path, "metadata"),
            )
            return
        recorded = self.metadata.get("fingerprint", {})
        differing = differences(recorded, as_json(self.paths.fingerprint))
        if differing:
            raise ParamError(
                f"run_id: the store holds a run {run_id!r} that this fit cannot resume. It was "
                f"trained with {'; '.join(differing)}. Set another run_id, or none for a new run, "
                f"or restore these settings. {self._advice(differing)}"
            )

    def _advice(self, differing: Sequence[str]) -> str:
        """Return advice other than a new run_id, depending on whether the checkpoints can load."""
        if any(map(_OTHER_STATE.fullmatch, differing)):
            return (
                "The checkpoints hold weights and optimizer state of the other network, which this "
                "one cannot load. To begin with some of its weights, load them into the model by "
                f"load_checkpoint(store, run_id={self.paths.run_id!r}) and fit with another run_id."
            )
        return f"To resume anyway, delete {run_file(self.paths.run_path, 'metadata')!r}."

    def check_reading(self, data: DataSpec) -> None:
        """Check that a run that was interrupted within an epoch reads rows in the same order.

        Raises
        ------
        ParamError
            If the order differs.
        """
        newest, run_id = self.newest, self.paths.run_id
        if newest is None:
            return
        if data.num_ranks < data.num_shards:
            logger.info(
                "run_id: the run %r began with %d ranks. The %d ranks of this fit train on their "
                "parts of each global batch in turn: batches and learning rate stay the same.",
                *(run_id, data.num_shards, data.num_ranks),
            )
        if not newest.rows:
            return
        fits = (self.metadata or {}).get("fits") or [{}]
        differing = differences(fits[-1].get("reading", {}), as_json(reading_identity(data)))
        if differing:
            raise ParamError(
                f"run_id: the run {run_id!r} was interrupted within epoch {newest.epoch + 1}, and "
                f"this fit reads rows in another order, with {'; '.join(differing)}: some rows of "
                "that epoch would be trained on twice, and others never. Restore these settings, "
                "or set another run_id. To repeat the epoch from its start, delete the run's "
                "checkpoints of a position within it, from "
                f"{checkpoint_path(self.paths, newest)!r} backwards."
            )

    @property
    def lost(self) -> bool:
        """True after another process has taken over the run, see `Lease.lost`."""
        return self._lease is not None and self._lease.lost

    def beat(self) -> None:
        """Renew the lease if this run is held; find out whether it is `lost`."""
        if self._lease is not None and self._lease.generation:
            self._lease.beat()

    def fencing_token(self, launch: int) -> FencingToken | None:
        """Return the token that allows the ranks of a launch, counted from 0, to write.

        From now on, ranks of earlier launches must not write. Returns None if the store saves no
        runs.
        """
        if self._lease is None:
            return None
        if launch:
            self._lease.advance()
        return FencingToken(self.paths.run_path, self._lease.generation, self._lease.token)

    @contextlib.contextmanager
    def without_orphans(self) -> Iterator[None]:
        """Delete the ranks' unfinished checkpoints if an exception ends the block.

        If another process trains the run by now, nothing is deleted.
        """
        try:
            yield
        except BaseException:
            directory = self.paths.checkpoints_path
            if directory is not None and not self.lost:
                with self._logged("Unfinished checkpoints of run %r could not be deleted: %s"):
                    names = self.store.names(directory)
                    for name in orphans(self.paths.checkpoint_filename, names):
                        self.store.delete(f"{directory}/{name}")
            raise

    @contextlib.contextmanager
    def _logged(self, message: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning(message, self.paths.run_id, error)


def _store(name: str, value: Store | str | PathLike[str]) -> Store:
    return as_store(value)


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

    store = param(
        "Store that keeps datasets, checkpoints and logs, or its path or URL. Default: Spark's "
        "configuration spark.hvdEstimators.store. Without it, a local master gets a temporary "
        "folder, which is deleted when the program ends.",
        convert=_store,
    )
    run_id = param(
        "Name of the run; one that the store holds is resumed. Default: a new name.", convert=string
    )

    log_to_mlflow = param(
        "Whether a fit logs its params, the metrics of each epoch and the fitted model to MLflow, "
        "if the thread that calls fit() has an active run. Each fit of a grid gets a child run, "
        "without its model.",
        default=True,
        convert=boolean,
    )

    def _get_store(self) -> Store:
        """Return the store that is set, or the application's default."""
        given: Store | None = self.getOrDefault("store")
        return default_store() if given is None else given

    def _check_run(self) -> None:
        """Check ``store`` and ``run_id`` without reading files of the store.

        Raises
        ------
        ParamError
            If there is no store, or ``run_id`` is not a valid folder name.
        """
        store, run_id = self._get_store(), self.getOrDefault("run_id")
        if run_id is not None:
            store.run_paths(run_id)

    def _fingerprint(self, manifest: DatasetManifest, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's fingerprint; only fits with an equal fingerprint can resume it.

        The fingerprint omits the numbers of ranks and epochs, which can differ in later fits of
        a run.
        """
        defaults = self._defaults()
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

    def _run_paths(self, fingerprint: Mapping[str, Any]) -> RunPaths:
        """Return the paths of the fit's run, with its fingerprint; the default name is unique."""
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        new = f"{self._framework}_{now}_{uuid.uuid4().hex[:6]}"
        run_id = self.getOrDefault("run_id") or new
        if self._grid_index is not None:
            run_id += f"-{digest({**fingerprint, 'grid': self._grid_index})}"
        return replace(self._get_store().run_paths(run_id), fingerprint=fingerprint)

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
            candidate = estimator.copy(paramMaps[index])
            given = {key if isinstance(key, str) else key.name for key in paramMaps[index]}
            if estimator.getOrDefault("run_id") is not None and "run_id" not in given:
                candidate._grid_index = index
            candidate._grid_tracking = tracking
            candidate._shared_data = shared
            with shared.fit():
                return candidate.fit(dataset)

        return Fits(fit_one, len(paramMaps))

    def join_fits_of(self, other: RunParams) -> None:
        """Take another estimator's place among the fits of a grid."""
        self._grid_index, self._grid_tracking = other._grid_index, other._grid_tracking
        self._shared_data = other._shared_data

    def _mlflow_logger(self, params: Mapping[str, Any]) -> MlflowLogger | None:
        """Return the MLflow logger of a fit, or None if it is off or has no MLflow run."""
        if not self.getOrDefault("log_to_mlflow"):
            return None
        within = self._grid_tracking or active_run()
        if within is None:
            return None
        return MlflowLogger(within, params, own_run=self._grid_tracking is not None)


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


class RunResults(tuple[TrainResult, ...]):
    """Results of the ranks, in the order of the ranks.

    Parameters
    ----------
    results : iterable of TrainResult
        One result per rank. The result of rank 0 holds the trained state.
    spec : TrainSpec
        The ranks' spec, of the framework's own class.
    """

    spec: Any

    def __new__(cls, results: Iterable[TrainResult], spec: Any) -> Self:
        """Create the results."""
        self = super().__new__(cls, results)
        self.spec = spec
        return self

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
        if len({result.weights_digest for result in self}) > 1:
            raise HvdEstimatorsError(self._unequal())
        state = self[0].state
        if state is None:
            raise ResultsError(
                "Rank 0 returned no trained state. A backend has to return the ranks' results in "
                "the order of the ranks."
            )
        return state

    def _unequal(self) -> str:
        """Return the message about ranks that ended with different weights."""
        names = unequal_weights([result.weight_digests for result in self])
        message = "The ranks ended with different weights"
        message += f": {named_weights(names)}. " if names else ". "
        message += "The user's callback, custom layer or step may treat ranks differently."
        run = getattr(self.spec, "run", None)
        if run is None:
            return message
        if run.checkpoints_path is None:
            return f"{message} Run {run.run_id!r} has no checkpoints: its result is lost."
        return (
            f"{message} The newest checkpoint of run {run.run_id!r}, in {run.checkpoints_path}, "
            f"has the state of rank 0: load_checkpoint(store, run_id={run.run_id!r}) reads it."
        )

    @property
    def history(self) -> tuple[EpochMetrics, ...]:
        """Metrics of the whole run, with one record per epoch."""
        return self[0].history
