"""Params of runs: which one a fit is, and what it is of. Runs on the driver."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from hvd_estimators.fitting.runs import Fits, data_identity, digest, named
from hvd_estimators.fitting.tracking import Tracking, TrackingRun, active_run
from hvd_estimators.model import HorovodModel
from hvd_estimators.params import boolean, declare, text
from hvd_estimators.params.columns import ColumnParams
from hvd_estimators.parquet.manifest import DatasetManifest
from hvd_estimators.store import RunPaths
from hvd_estimators.store.base import require_store

__all__ = ["RunParams"]


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

    store = declare("Store that keeps datasets, checkpoints and logs. Required.")
    run_id = declare(
        "Name of the run; one that the store holds is resumed. Default: a new name.", convert=text
    )

    log_to_mlflow = declare(
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
