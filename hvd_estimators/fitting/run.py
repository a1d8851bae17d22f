"""Runs: lookup in the store, lease and results.

A fit can use other reader settings than an earlier fit of its run, if it resumes at the start of an
epoch. Within an epoch, other settings are not allowed: some rows would be read twice, and others
never. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, ResultsError
from hvd_estimators.fitting.fingerprint import as_json, differences, digest, reading_identity
from hvd_estimators.fitting.mlflow import TrackingRun
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.prepare.datasets import SharedDatasets
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.store.checkpoints import checkpoint_path, positions
from hvd_estimators.store.leases import FencingToken, Lease
from hvd_estimators.store.paths import Position, orphans
from hvd_estimators.store.runs import read_metadata, run_file
from hvd_estimators.training.spec import EpochMetrics, TrainResult, named_weights, unequal_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadOrder:
    """Settings that determine the row order for given data, fixed when the run starts.

    Attributes
    ----------
    canonical_shards : int
        Number of shards into which the rows are split: the run's initial number of ranks.
    random_seed : int
        Seed of the order, set by the user or drawn at random.
    row_bytes : int or None
        `ShardPlan.row_bytes`, which the shuffle buffer depends on; None if not known yet.
    """

    canonical_shards: int
    random_seed: int
    row_bytes: int | None = None


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
        self.canonical_shards: int | None = None
        self._valid: Position | None = None
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

    def resume_from(self, position: Position, canonical_shards: int) -> None:
        """Note the newest checkpoint that can be read, and the number of shards in it."""
        self._valid, self.canonical_shards = position, canonical_shards

    @property
    def resumed(self) -> Position | None:
        """Newest checkpoint before this fit that can be read; None for a new run."""
        return self._valid or self.newest

    @property
    def epochs_done(self) -> int:
        """Number of epochs that were complete before this fit."""
        return self.resumed.epoch if self.resumed is not None else 0

    @property
    def row_order(self) -> ReadOrder | None:
        """Row order of a resumed run; None for a new run, and if its record was deleted."""
        order = (self.metadata or {}).get("row_order")
        if order is None:
            return None
        # A later version may record more.
        return ReadOrder(order["canonical_shards"], order["random_seed"], order["row_bytes"])

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
        recorded, own = self.metadata.get("fingerprint", {}), as_json(self.paths.fingerprint)
        differing = differences(recorded, own)
        if differing:
            raise ParamError(
                f"run_id: the store holds a run {run_id!r} that this fit cannot resume. It was "
                f"trained with {'; '.join(differing)}. Set another run_id, or none for a new run, "
                f"or restore these settings. {self._advice(recorded, own)}"
            )

    def _advice(self, recorded: Mapping[str, Any], own: Mapping[str, Any]) -> str:
        """Return advice other than a new run_id, depending on whether the checkpoints can load."""
        before, after = recorded.get("model", {}), own.get("model", {})
        shared = before.keys() & after.keys()
        others = any(before[key] != after[key] for key in {"weights", "optimizer"} & shared)
        if others or before.get("optimizers", {}).keys() != after.get("optimizers", {}).keys():
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
        newest, run_id = self.resumed, self.paths.run_id
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
        if self.metadata is None:
            raise ParamError(
                f"run_id: the run {run_id!r} was interrupted within epoch {newest.epoch + 1}, and "
                f"{run_file(self.paths.run_path, 'metadata')!r}, which is missing, had the order "
                f"of its rows. {self._repeating(newest)} Or set another run_id."
            )
        fits = self.metadata.get("fits") or [{}]
        differing = differences(fits[-1].get("reading", {}), as_json(reading_identity(data)))
        if differing:
            raise ParamError(
                f"run_id: the run {run_id!r} was interrupted within epoch {newest.epoch + 1}, and "
                f"this fit reads rows in another order, with {'; '.join(differing)}: some rows of "
                "that epoch would be trained on twice, and others never. Restore these settings, "
                f"or set another run_id. {self._repeating(newest)}"
            )

    def _repeating(self, newest: Position) -> str:
        return (
            "To repeat the epoch from its start, delete the run's checkpoints of a position within "
            f"it, from {checkpoint_path(self.paths, newest)!r} backwards."
        )

    @property
    def lost(self) -> bool:
        """True after another process has taken over the run, see `Lease.lost`."""
        return self._lease is not None and self._lease.lost

    def beat(self) -> None:
        """Renew the lease if this run is held; find out whether it is `lost`.

        A process that was paused does not know it before.
        """
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
            self.beat()
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


@dataclass(frozen=True)
class GridFit:
    """One fit's place in a grid.

    Attributes
    ----------
    shared : SharedDatasets
        The datasets that the grid's fits share.
    tracking : TrackingRun or None
        The MLflow run of the thread that called `fitMultiple`; other threads fit.
    index : int or None
        Index of the fit, if its run's name needs one.
    """

    shared: SharedDatasets
    tracking: TrackingRun | None
    index: int | None


def run_paths(
    settings: Settings, framework: str, fingerprint: Mapping[str, Any], grid: GridFit | None
) -> RunPaths:
    """Return the paths of a fit's run, with its fingerprint; the default name is unique.

    Parameters
    ----------
    settings : Settings
        The params of the fit.
    framework : str
        Prefix of a new name.
    fingerprint : mapping
        The fingerprint of the fit.
    grid : GridFit or None
        The fit's place in a grid; its index is part of the name.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_id = settings.run_id or f"{framework}_{now}_{uuid.uuid4().hex[:6]}"
    if grid is not None and grid.index is not None:
        run_id += f"-{digest({**fingerprint, 'grid': grid.index})}"
    return replace(settings.store.run_paths(run_id), fingerprint=fingerprint)


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
