"""Training plan: the rows that each rank reads, the reader options and the number of steps.

Runs on the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.discovery import first_rows
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.run import ReadOrder, Run, RunParams
from hvd_estimators.fitting.stores import store_of
from hvd_estimators.fitting.trial import DRY_RUN_ROWS
from hvd_estimators.launch.backend import Backend
from hvd_estimators.loading.plan import ShardPlan, order_warning, plan_shards
from hvd_estimators.loading.spec import (
    DataSpec,
    ReaderOptions,
    check_shards,
    choose_data_module,
    reads_several,
)
from hvd_estimators.loading.transform import Transformation
from hvd_estimators.params.estimator import (
    CheckpointParams,
    ColumnParams,
    RankParams,
    ReadingParams,
    TrainingParams,
)
from hvd_estimators.params.model import TransformationParams
from hvd_estimators.store import RunPaths, Store
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)


class TrainPlanning(
    RunParams,
    CheckpointParams,
    ColumnParams,
    TrainingParams,
    RankParams,
    ReadingParams,
    TransformationParams,
):
    """Planning of the ranks' `TrainSpec` from a dataset and an estimator's params."""

    def _shards_of_named_run(self, num_ranks: int) -> int:
        """Return the number of shards to write; an existing run ``run_id`` keeps its number.

        The files, and therefore the order of the rows, are then the same as in the run's first fit.
        The names of grid runs depend on the written rows. Grid data are therefore written for the
        current number of ranks.

        Raises
        ------
        ParamError
            If these ranks cannot resume the run, or another fit trains it.
        """
        store, run_id = self._get_store(), self.getOrDefault("run_id")
        if run_id is None or self._grid_index is not None:
            return num_ranks
        run = self._make_run(store.run_paths(run_id))
        run.require_free()
        order = run.load().row_order
        if order is None:
            return num_ranks
        num_shards = order.canonical_shards
        check_shards(self.getOrDefault("data_module"), num_shards, num_ranks, run_id)
        return num_shards

    def _make_run(self, paths: RunPaths) -> Run:
        """Return a run; with ``max_restarts``, this fit waits for its lease."""
        patient = self.getOrDefault("max_restarts") > 0
        return Run(self._get_store(), paths, patient=patient)

    def _check_restarts(self, backend: Backend) -> None:
        """Check that the ranks can be relaunched with ``min_num_proc`` ranks.

        Raises
        ------
        ParamError
            If ``min_num_proc`` exceeds the initial number of ranks, or if fewer ranks cannot read
            the data.
        """
        least = self.getOrDefault("min_num_proc")
        if least is None:
            return
        if not self.getOrDefault("max_restarts"):
            logger.warning(
                "min_num_proc has no effect without max_restarts, because no relaunch follows. Set "
                "max_restarts as well."
            )
        num_ranks = backend.num_processes()
        if least > num_ranks:
            raise ParamError(
                f"min_num_proc: expected at most num_proc, the {num_ranks} ranks of the first "
                f"launch, found {least}. Set it to {num_ranks} or less."
            )
        if least < num_ranks and not reads_several(self.getOrDefault("data_module")):
            raise ParamError(
                f"min_num_proc: found {least}, and data_module "
                f"{self.getOrDefault('data_module')!r} reads the shard of one rank only. Leave "
                "min_num_proc out, or use a data module of this package."
            )

    def _common_spec(
        self, manifest: DatasetManifest, num_ranks: int, run: RunPaths, order: ReadOrder
    ) -> TrainSpec:
        """Return the `TrainSpec` that is common to all frameworks.

        A resumed run keeps the ``order`` that it started with.

        Raises
        ------
        ParamError
            If these ranks cannot resume the run.
        """
        module = self.getOrDefault("data_module")
        check_shards(module, order.canonical_shards, num_ranks, run.run_id)
        params = self._params_in(TrainSpec)
        params["callbacks"] = tuple(params["callbacks"])
        params["store"] = self._get_store()
        return TrainSpec(
            **params,
            data=self._plan(manifest, order.canonical_shards, num_ranks, order.random_seed),
            run=run,
            checkpoints=self._checkpoint_options(self._framework),
        )

    def _plan(
        self, manifest: DatasetManifest, num_shards: int, num_ranks: int, seed: int
    ) -> DataSpec:
        """Plan the rows that each shard reads, the reader options and the steps per epoch.

        Parameters
        ----------
        manifest : DatasetManifest
            The dataset.
        num_shards : int
            Number of canonical shards.
        num_ranks : int
            Number of ranks that run the shards.
        seed : int
            Seed of the row order.

        Raises
        ------
        DataError
            If there are fewer training rows than shards.
        """
        get = self.getOrDefault
        needed = set(self._needed_columns())
        buffer_bytes = self._shuffle_buffer_bytes()
        columns = self._read_columns([c for c in manifest.columns if c.name in needed])
        groups = manifest.train.row_groups
        plan = plan_shards(
            groups,
            num_shards,
            seed=seed if get("shuffle") else None,
            # Rows that were written in random order can be read one row group after another.
            open_bytes=0 if manifest.shuffled else buffer_bytes,
        )
        if get("shuffle") and not (manifest.shuffled or get("inmemory_cache_all")):
            warning = order_warning(groups, plan, columns, buffer_bytes)
            if warning:
                logger.warning(warning)
        val_plan: ShardPlan | None = None
        if manifest.validation is not None:
            val_plan = plan_shards(manifest.validation.row_groups, num_shards, allow_empty=True)
        batch_size = get("batch_size")
        val_batch_size = get("val_batch_size") or batch_size
        return DataSpec(
            columns=columns,
            train_path=manifest.train.path,
            val_path=manifest.validation.path if manifest.validation else None,
            train_plan=plan,
            val_plan=val_plan,
            num_ranks=num_ranks,
            feature_cols=self._input_columns().names,
            label_cols=tuple(get("label_cols")),
            sample_weight_col=get("sample_weight_col"),
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            train_steps_per_epoch=get("train_steps_per_epoch") or plan.steps(batch_size),
            validation_steps_per_epoch=get("validation_steps_per_epoch")
            or (val_plan.steps(val_batch_size) if val_plan else 0),
            random_seed=seed,
            data_module=choose_data_module(get("data_module")),
            options=self._reader_options(self._data_store(manifest)),
            inputs=self._input_columns(),
        )

    def _read_columns(self, columns: Sequence[ColumnSpec]) -> tuple[ColumnSpec, ...]:
        """Return columns as the readers deliver them.

        Matrices are read as such, unless a transformation takes their columns and stacks them.
        """
        return tuple(columns) if self._transformation() else self._input_columns().specs(columns)

    def _data_store(self, manifest: DatasetManifest) -> Store:
        """Return the store that opens the files of a dataset."""
        return store_of(manifest.train.path, self._get_store())

    def _reader_options(self, store: Store) -> ReaderOptions:
        """Return the reader options from the params; ``store`` opens the files."""
        get = self.getOrDefault
        params = self._params_in(ReaderOptions)
        del params["store"]
        params["shuffle_buffer_size"] = self._shuffle_buffer_bytes()
        return ReaderOptions(
            **params,
            train_reader_worker_count=get("train_reader_num_workers"),
            val_reader_worker_count=get("val_reader_num_workers"),
            transform_fn=get("transformation_fn"),
            transformation=self._transformation(),
            store=store,
            storage_options=store.storage_options,
        )

    def _params_in(self, spec: type[Any]) -> dict[str, Any]:
        """Return the values of the params that a spec has fields of the same name for."""
        names = [field.name for field in fields(spec)]
        return {name: self.getOrDefault(name) for name in names if name in self._declarations}

    def _transformation(self) -> Transformation | None:
        """Return the readers' transformation of rows, or None if there is none."""
        get = self.getOrDefault
        inputs, weight = self._input_columns(), get("sample_weight_col")
        transformation = self._make_transformation(
            (*inputs.columns, *get("label_cols"), *([weight] if weight else [])),
            tuple(self._text_cols()),
        )
        if transformation is None or not inputs.matrices:
            return transformation
        return replace(transformation, inputs=inputs)

    def _first_rows(self, manifest: DatasetManifest) -> Columns:
        """Return the first rows of a dataset after the transformation, as the model gets them."""
        manifest = replace(manifest, columns=self._read_columns(manifest.columns))
        rows = first_rows(self._data_store(manifest), manifest, DRY_RUN_ROWS)
        transformation = self._transformation()
        return rows if transformation is None else transformation(rows)

    def _example_rows(self, manifest: DatasetManifest) -> Columns:
        """Return the first rows of a dataset with the columns that the fitted model takes."""
        rows = first_rows(self._data_store(manifest), manifest, DRY_RUN_ROWS)
        transformation = self._transformation()
        if transformation is None or self.getOrDefault("apply_transformation"):
            return rows
        # The fitted model stacks matrices itself.
        return replace(transformation, inputs=None)(rows)
