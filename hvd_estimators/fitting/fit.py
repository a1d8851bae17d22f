"""One fit, from the check of its params to the fitted model. Runs on the driver."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest
from hvd_estimators.data.rows import ROWS
from hvd_estimators.exceptions import (
    ColumnError,
    HvdEstimatorsError,
    ParamError,
    ShapeError,
    StoreError,
    WorkerFailedError,
)
from hvd_estimators.fitting import checks
from hvd_estimators.fitting.fingerprint import data_identity, named, with_options
from hvd_estimators.fitting.framework import Fittable, Framework
from hvd_estimators.fitting.mlflow import MlflowLogger, active_run
from hvd_estimators.fitting.planning import common_spec, rows_of_model, rows_of_transform
from hvd_estimators.fitting.progress import (
    StageRow,
    describe_rows,
    format_size,
    show_collectives,
    show_learning_rates,
    show_progress,
)
from hvd_estimators.fitting.record import RunRecord, hyperparameters, recorded_params, start_record
from hvd_estimators.fitting.restarts import FitLaunches, ending_by_sigterm, warming_up
from hvd_estimators.fitting.run import ReadOrder, Run, RunResults, run_paths
from hvd_estimators.fitting.run_loggers import RunLoggers
from hvd_estimators.fitting.settings import Settings
from hvd_estimators.fitting.stores import (
    ParquetFiles,
    Paths,
    configured_store,
    find_files,
    find_tables,
)
from hvd_estimators.fitting.tensorboard import TensorBoardLogger
from hvd_estimators.fitting.trial import (
    DRY_RUN_ROWS,
    Trial,
    try_batches,
    warning_of_draws,
    zeros,
)
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.launch.backend import Backend, as_backend
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import describing, jobs_on, spark_job, spread_over_tasks
from hvd_estimators.launch.gpus import HIDDEN
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.loading.collate_fn import check_without_labels
from hvd_estimators.loading.spec import check_shards, reads_several
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.model import PREDICTION, HorovodModel
from hvd_estimators.prepare.dataframe import prepare_data
from hvd_estimators.prepare.datasets import column_metadata, dataset_bytes, load_manifest
from hvd_estimators.prepare.schema import known_columns, quoted, require_columns
from hvd_estimators.store import RunPaths
from hvd_estimators.store.checkpoints import CheckpointInfo, check_valid, find_newest_valid
from hvd_estimators.store.paths import Position
from hvd_estimators.summary import TrainingSummary, find_best_epoch, selecting_metric
from hvd_estimators.training.call_transfer import CallTransfer
from hvd_estimators.training.run_state import check_state
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)


class Fit:
    """One fit of an estimator: check, prepare the data, try the model, plan, launch, wrap.

    `on_frame`, `on_files`, `on_table` and `on_dataset` are the ways to begin; all continue with
    `_train`. As a context manager, it lets errors name the params as the user has set them.

    Parameters
    ----------
    estimator : HorovodEstimator
        The estimator with the params of this fit. It is not modified.

    Attributes
    ----------
    estimator : HorovodEstimator
        The estimator, or a copy with the objects that the user's functions have built.
    settings : Settings
        Its params.
    framework : Framework
        The framework's part of the fit.
    """

    def __init__(self, estimator: Fittable) -> None:
        self._use(estimator.framework_class.with_objects(estimator))

    def _use(self, estimator: Fittable) -> None:
        framework_class = estimator.framework_class
        self.estimator = estimator
        self.settings: Settings = framework_class.settings_class.of(
            estimator, estimator.upstream_names
        )
        self.framework: Framework = framework_class(self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, HvdEstimatorsError):
            self.settings.name_param(error)

    # How a fit begins

    def on_frame(self, dataset: DataFrame) -> Any:
        """Write a DataFrame as Parquet, train on it, and return the model."""
        numbers = (T.NumericType, T.BooleanType)
        self._convert_labels([f.name for f in dataset.schema if isinstance(f.dataType, numbers)])
        written_after = None
        with contextlib.ExitStack() as stack:
            with self._showing("Checking params, store and task slots") as shown:

                def write(**options: Any) -> contextlib.AbstractContextManager[str]:
                    nonlocal written_after
                    written_after, shown.doing = shown.seconds, "Writing training data"
                    return prepare_data(**options)

                backend = self.ready_backend()
                checks.check_monitored(self.settings, self.settings.validation is not None)
                self._check_columns(dataset)
                # Executors import the framework while the driver tries the model: the task slots
                # are free until the rows are written.
                with jobs_on(dataset), self._warming_up(backend):
                    shown.doing = "Trying the model on some rows"
                    trial = self._try_frame(dataset)
                    num_shards = self._shards_to_write(backend.num_processes())
                    shown.doing = "Waiting for data that another fit writes"
                    prepared = self._prepare(dataset, num_shards, write)
                    run_id = self.settings.run_id
                    written = "Write training data" + (f" of run {run_id}" if run_id else "")
                    with describing(written), spark_job(current_cluster()):
                        dataset_idx = stack.enter_context(prepared)
                manifest = load_manifest(self.settings.store, dataset_idx)
                self._show_prepared(shown, dataset_idx, manifest, written_after)
            return self._train(manifest, backend, trial)

    def on_files(self, path: Paths | None, validation_path: Paths | None) -> Any:
        """Train on existing Parquet files, and return the model."""
        files = self._find_files(path, validation_path)
        backend, store = self.ready_backend(), self.settings.store
        is_default = files.train == (store.get_train_data_path(),)
        if is_default and not files.validation and store.exists(store.get_val_data_path()):
            logger.warning(
                "validation is not set: the files in %s are not used. Set it, to True for "
                "example, to validate on them.",
                store.get_val_data_path(),
            )
        return self._on_found(files, backend)

    def on_table(self, table: Any, where: Any, validation_where: Any) -> Any:
        """Train on the files of a table, and return the model."""
        self.check()
        # A wrong name leaves no folder of the store.
        files = self._find_tables(table, where, validation_where)
        return self._on_found(files, self._checked_backend())

    def _on_found(self, files: ParquetFiles, backend: Backend) -> HorovodModel:
        doing = "Reading the footers of the Parquet files"
        in_tasks = functools.partial(spread_over_tasks, description=doing)
        with self._showing(doing) as shown:
            manifest = read_manifest(
                files.store,
                files.train,
                files.validation,
                self.settings.needed_columns,
                allow_text=self.settings.allowed_text,
                spread=in_tasks if isinstance(backend, SparkBackend) else None,
            )
            shown.finish(f"Training on existing files: {describe_rows(manifest)}.")
        return self._train(manifest, backend)

    def on_dataset(self, dataset_idx: str) -> Any:
        """Train on a dataset of `prepare_data`, and return the model."""
        backend = self.ready_backend()
        store, validation = self.settings.store, self.settings.validation
        reading = self._showing(f"Reading the manifest of prepared data {dataset_idx}")
        with reading as shown:
            manifest = load_manifest(store, dataset_idx)
            if validation and manifest.validation is None:
                raise ParamError(
                    f"validation: found {validation!r}, but the dataset {dataset_idx!r} has no "
                    "validation part. Pass validation to prepare_data as well, or leave it out "
                    "here."
                )
            _require_prepared(dataset_idx, manifest, self.settings.needed_columns)
            self._show_prepared(shown, dataset_idx, manifest)
            return self._train(manifest, backend)

    # Check

    def check(self) -> None:
        """Check the params, without reading files of the store."""
        self.estimator._check_other_names()
        checks.check_params(self.framework)

    def ready_backend(self) -> Backend:
        """Run all checks that need no data, and return the backend."""
        self.check()
        return self._checked_backend()

    def _checked_backend(self) -> Backend:
        """Check the backend and the store, and return the backend."""
        backend = as_backend(self.estimator._get_or_create_backend())
        checks.check_restarts(self.settings, backend)
        backend.check()
        if self.framework.collectives == "horovod":
            backend.check_horovod()
        self.settings.store.check()
        backend.check_store(self.settings.store)
        return backend

    def _check_columns(self, dataset: DataFrame) -> None:
        """Check that the DataFrame has the columns of the params, each once."""
        require_columns(dataset, "feature_cols", self.settings.inputs.columns)
        for name in ("label_cols", "sample_weight_col"):
            columns = self.settings.get(name)
            if columns:
                require_columns(dataset, name, [columns] if isinstance(columns, str) else columns)

    # Prepare

    def _find_files(self, path: Paths | None, validation_path: Paths | None) -> ParquetFiles:
        """Return the existing files to train on."""
        if path is None and self.settings.get("store") is None and configured_store() is None:
            raise ParamError(
                "path is not set. Pass the path or URL of the Parquet files, or set store to "
                "Store.create(prefix, train_path=...)."
            )
        validation, store = self.settings.validation, self.settings.store
        if validation and validation_path is None:
            if path is not None:
                raise ParamError(
                    f"validation: found {validation!r}, but existing files are not split. Pass the "
                    "path of the validation files as validation_path, or leave validation out."
                )
            validation_path = store.get_val_data_path()
        files = find_files(store, path, validation_path)
        module = self.settings.data_module
        if not reads_several(module) and max(len(files.train), len(files.validation)) > 1:
            raise ParamError(
                f"path: found {len(files.train)} paths for training and {len(files.validation)} "
                f"for validation, and the data_module {module.__name__} reads one. Pass one "
                "folder, or leave data_module out."
            )
        return files

    def _find_tables(self, table: Any, where: Any, validation_where: Any) -> ParquetFiles:
        """Return the files of a table to train on."""
        settings, module = self.settings, self.settings.data_module
        if settings.validation and validation_where is None:
            raise ParamError(
                f"validation: found {settings.validation!r}, but the files of a table are not "
                "split. Choose the validation rows by validation_where, or leave validation out."
            )
        if not reads_several(module):
            raise ParamError(
                f"data_module: {module.__name__} reads whole folders, which may hold files that "
                f"are not part of the table {table!r}. Leave data_module out."
            )
        with self._showing(f"Listing the files of the table {table}"):
            return find_tables(
                *(settings.store, table, where, validation_where),
                *(settings.needed_columns, settings.allowed_text),
            )

    def _shards_to_write(self, num_ranks: int) -> int:
        """Return the number of shards to write; an existing run ``run_id`` keeps its number.

        The files, and therefore the order of the rows, are then the same as in the run's first fit.
        The names of grid runs depend on the written rows. Grid data are therefore written for the
        current number of ranks.

        Raises
        ------
        ParamError
            If these ranks cannot resume the run, or another fit trains it.
        """
        run_id = self.settings.run_id
        grid = self.estimator.grid_fit
        if run_id is None or (grid is not None and grid.index is not None):
            return num_ranks
        run = self._run(self.settings.store.run_paths(run_id))
        run.require_free()
        order = run.load().row_order
        if order is None:
            # Only the checkpoints know. Otherwise, they are read when the data are there.
            self._check_resumable(run)
        shards = run.canonical_shards if order is None else order.canonical_shards
        if shards is None:
            return num_ranks
        check_shards(self.settings.data_module, shards, num_ranks, run_id)
        return shards

    def _prepare(
        self,
        dataset: DataFrame,
        num_shards: int,
        write: Callable[..., contextlib.AbstractContextManager[str]],
    ) -> contextlib.AbstractContextManager[str]:
        """Yield the index of a DataFrame's dataset, which is valid until the block ends.

        ``write`` has the arguments of `prepare_data`. It is not called if another fit of a grid has
        written the dataset.
        """
        settings = self.settings
        options: dict[str, Any] = {
            "num_processes": num_shards,
            "store": settings.store,
            "df": dataset,
            "label_columns": settings.label_cols,
            "feature_columns": settings.all_feature_cols,
            "validation": settings.validation,
            "sample_weight_col": settings.sample_weight_col,
            "compress_sparse": settings.compress_sparse_cols,
            "partitions_per_process": settings.partitions_per_process,
            "random_seed": settings.random_seed,
            "check_finite": settings.check_finite,
            "allow_text": settings.allowed_text,
            # Users who turn off shuffling rely on the order of the rows.
            "shuffle_on_write": settings.shuffle and settings.shuffle_on_write,
        }
        grid = self.estimator.grid_fit
        return write(**options) if grid is None else grid.shared.acquire(options, write)

    def _warming_up(self, backend: Backend) -> contextlib.AbstractContextManager[None]:
        settings = self.settings
        return warming_up(backend, self.framework.train, settings.store, settings.rank_environment)

    # Try

    def _try_frame(self, dataset: DataFrame) -> Trial | None:
        """Try the model before the DataFrame is written, to fail early.

        If the schema determines all shapes, the model is tried on zeros. If zeros fail, the
        DataFrame's first rows decide.

        Returns
        -------
        Trial or None
            None if the model must be tried on the first written rows, too.
        """
        if self.settings.transformation is not None or not self._can_try():
            return None  # only the written rows show the transformation's output
        if self.settings.collate is not None:
            return None  # likewise, the batches
        specs = known_columns(dataset, self.settings.needed_columns, self.settings.text_cols)
        if specs is None:
            return None
        # Zeros may be invalid input for the model. The first real rows decide and give the error.
        with contextlib.suppress(ShapeError):
            trial = self.framework.dry_run(zeros(self.settings.inputs.specs(specs)))
            # Only values show what a loss or metric computes, and whether a copy is equal.
            return trial if trial.output_shapes is None else None
        rows = _first_rows(dataset, specs)
        return None if rows is None else self._try(self.settings.inputs.stack(rows))

    def _try_rows(self, manifest: DatasetManifest) -> Trial:
        """Try the model on the first rows of a dataset."""
        if not self._can_try():
            first_rows = functools.partial(rows_of_model, self.settings, manifest)
            return self.framework.without_dry_run(first_rows)
        settings = self.settings
        param = settings.function_of_rows
        is_seeded = settings.reader_pool_type == "process"
        if param is None or is_seeded or not reads_several(settings.data_module):
            return self._try(rows_of_model(settings, manifest))
        with warning_of_draws(param):
            columns = rows_of_model(settings, manifest)
            settings.delivered(columns)
        return self._try(columns)

    def _can_try(self) -> bool:
        return bool(self.settings.dry_run) and not self.settings.reads_itself

    def _try(self, columns: Columns) -> Trial:
        settings = self.settings
        trial = try_batches(self.framework.dry_run, columns, settings.batch_size)
        if settings.collate is not None:
            rows: Any = columns[ROWS]
            check_without_labels(
                settings.collate, rows, settings.all_feature_cols, settings.label_cols
            )
        return trial

    def _convert_labels(self, numbers: Collection[str]) -> None:
        """Let labels have the type that the loss takes."""
        converting = type(self.framework).with_label_types(self.estimator, numbers)
        if converting is not self.estimator:
            self._use(converting)

    # Plan

    def _train(
        self, manifest: DatasetManifest, backend: Backend, trial: Trial | None = None
    ) -> HorovodModel:
        """Train on a dataset and return the model.

        ``trial`` is the result of a dry run on the DataFrame, if there was one.
        """
        self._convert_labels([spec.name for spec in manifest.columns if spec.is_number])
        settings, framework = self.settings, self.framework
        checks.check_weights(settings, manifest)
        tried = self._try_rows(manifest) if trial is None else trial
        checks.check_trial(framework, tried, manifest)
        checks.check_numbers(framework, tried, manifest)
        checks.check_monitored(settings, manifest.validation is not None, tried.metric_names)

        fingerprint = self._fingerprint(manifest, tried)
        paths = run_paths(settings, framework.name, fingerprint, self.estimator.grid_fit)
        with self._run(paths) as run:
            run.load().check_fingerprint()
            self._check_resumable(run)
            seed = settings.random_seed
            seed = secrets.randbits(31) if seed is None else seed
            shards = run.canonical_shards or backend.num_processes()
            order = run.row_order or ReadOrder(shards, seed)
            self._show_start(run, order, backend.num_processes(), tried)

            def spec_for(num_ranks: int) -> TrainSpec:
                common = common_spec(
                    settings, framework.name, manifest, num_ranks, run.paths, order
                )
                data = common.data.with_min_batch_rows(framework.min_batch_rows(tried))
                return framework.make_spec(replace(common, data=data), tried)

            try:
                return self._launch(run, backend, spec_for, tried, manifest)
            except WorkerFailedError as error:
                # The message holds the rank's traceback. The driver's frames would bury it.
                raise error.with_traceback(None) from None

    def _fingerprint(self, manifest: DatasetManifest, trial: Trial) -> dict[str, Any]:
        """Return the run's fingerprint; only fits with an equal fingerprint can resume it.

        The fingerprint omits the numbers of ranks and epochs, which can differ in later fits of a
        run.
        """
        settings, framework = self.settings, self.framework
        optional = filter(settings.differs, framework.optional_run_settings)
        return {
            "data": data_identity(manifest, settings.needed_columns),
            "model": framework.model_identity(trial),
            "settings": {
                name: (with_options if name == "loss" else named)(settings.values[name])
                for name in (*framework.run_settings, *optional)
            },
        }

    def _run(self, paths: RunPaths) -> Run:
        """Return a run; with ``max_restarts``, this fit waits for its lease."""
        return Run(self.settings.store, paths, patient=self.settings.max_restarts > 0)

    def _check_resumable(self, run: Run) -> None:
        """Check that the ranks can resume from one of the run's checkpoints, and find it."""

        def check(info: CheckpointInfo) -> int:
            try:
                return check_state(run.store, info.path)
            except StoreError:
                check_valid(run.store, info)
                raise

        found = find_newest_valid(run.store, run.paths, check, run.checkpoints)
        if found is not None:
            info, shards = found
            run.resume_from(Position(info.epoch, info.rows), shards)

    # Launch

    def _launch(
        self,
        run: Run,
        backend: Backend,
        spec_for: Callable[[int], TrainSpec],
        trial: Trial,
        manifest: DatasetManifest,
    ) -> HorovodModel:
        """Run the trainer on every rank, show progress, and create the model from the results.

        Parameters
        ----------
        run : Run
            The run, whose lease this fit holds.
        backend : Backend
            Backend that runs the ranks.
        spec_for : callable
            Returns the `TrainSpec` for a given number of ranks.
        trial : Trial
            Result of the dry run.
        manifest : DatasetManifest
            The dataset.
        """
        settings = self.settings
        spec = spec_for(backend.num_processes())
        run.check_reading(spec.data)
        with CallTransfer(spec) as transfer:
            with transfer.describing_saved_state(trained=False):
                launches = FitLaunches(
                    *(run, transfer, self.framework.train, spec_for, spec),
                    *(settings.max_restarts, settings.min_num_proc),
                )
            transfer.delete_others()
            started = time.monotonic()
            with (
                ending_by_sigterm(),
                self._record(run, spec, trial) as record,
                run.without_orphans(),
            ):
                with (
                    transfer.describing_saved_state(trained=False),
                    show_progress(spec, run.resumed) as shown,
                ):
                    env = {**({} if spec.use_gpu else HIDDEN), **settings.rank_environment}
                    handler = record.handler(shown)
                    results = launches.results(backend, env, handler, record.restarted)
                seconds = time.monotonic() - started
                with transfer.describing_saved_state(trained=True):
                    run_results = RunResults(transfer.read(results), launches.spec)
                    model = self._wrap(run_results, trial)
                    model._summary = self._summary(run_results, seconds, len(launches.failures))
                    record.complete(
                        run_results.history,
                        model,
                        run_results[0].stopped,
                        lambda: rows_of_transform(settings, manifest),
                    )
                    return model

    def _record(self, run: Run, spec: TrainSpec, trial: Trial) -> RunRecord:
        """Create the record of this fit, which is updated while the ranks train."""
        mlflow = self.mlflow_logger()
        optional: list[Logger] = [] if mlflow is None else [mlflow]
        logs = spec.run.logs_path
        if logs is not None and not self.framework.ranks_log:
            optional.append(TensorBoardLogger(spec.store, logs, self.settings.has_own_tensorboard))
        logged = LoggedRun(
            run_id=run.paths.run_id,
            key=hashlib.sha256(run.paths.run_path.encode()).hexdigest()[:40],
            epoch=run.epochs_done,
            hyperparameters=hyperparameters(self.estimator, self.framework.learning_rates(trial)),
        )
        required = self.settings.loggers
        loggers = RunLoggers(logged, required, optional, is_resumed=run.newest is not None)
        return RunRecord(run, start_record(self.estimator, run, spec), loggers, mlflow)

    def mlflow_logger(self) -> MlflowLogger | None:
        """Return the MLflow logger of the fit, or None if it is off or has no MLflow run."""
        if not self.settings.log_to_mlflow:
            return None
        grid = self.estimator.grid_fit
        of_grid = None if grid is None else grid.tracking
        within = of_grid or active_run()
        if within is None:
            return None
        params = recorded_params(self.estimator, only_set=True)
        return MlflowLogger(within, params, own_run=of_grid is not None)

    # Wrap

    def _wrap(self, results: RunResults, trial: Trial) -> HorovodModel:
        """Create the fitted model from the ranks' results."""
        spec: TrainSpec = results.spec
        metadata = column_metadata(spec.data.columns)
        model = self.estimator._create_model(results, spec.run.run_id, metadata)
        shapes = trial.predicted_shapes or trial.output_shapes
        if shapes is None:
            shapes = results[0].output_shapes
        if shapes is not None and not model.isSet("output_shapes"):
            model._set(output_shapes=[list(shape) for shape in shapes])
        if trial.predicted_shapes in (None, trial.output_shapes):
            self._set_prediction(model)
        return model

    def _set_prediction(self, model: HorovodModel) -> None:
        """Let a model add the column ``prediction`` by default, if it predicts one label."""
        shapes, labels = model.getOrDefault("output_shapes"), self.settings.label_cols
        if self.settings.upstream_names or not shapes or len(shapes) != 1 or len(labels) != 1:
            return
        shape = tuple(shapes[0])
        kind = self.settings.kind_of_outputs(shape)
        if kind is None or len(shape) > 1 or (kind == "values" and not is_scalar(shape)):
            return
        model._setDefault(outputs_are=kind, predictionCol=PREDICTION)

    def _summary(self, results: RunResults, seconds: float, restarts: int) -> TrainingSummary:
        """Return the summary of the fit, see `TrainingSummary`."""
        data, val_plan = results.spec.data, results.spec.data.val_plan
        settings = self.settings
        monitor = selecting_metric(
            settings.checkpoint_monitor, settings.checkpoint_mode, settings.selecting_callbacks
        )
        return TrainingSummary(
            run_id=results.spec.run.run_id,
            metrics=tuple(row for record in results.history for row in record.rows()),
            best_epoch=find_best_epoch(results.history, *monitor),
            rows=data.train_plan.total_rows,
            validation_rows=0 if val_plan is None else val_plan.total_rows,
            num_ranks=data.num_ranks,
            seconds=seconds,
            restarts=restarts,
            stopped=results[0].stopped,
        )

    # Show

    def _showing(self, doing: str) -> StageRow:
        return StageRow(doing, self.settings.verbose)

    def _show_prepared(
        self,
        shown: StageRow,
        dataset_idx: str,
        manifest: DatasetManifest,
        written_after: float | None = None,
    ) -> None:
        """Show the size of a dataset, and how long it took to write if this fit wrote it."""
        if self.settings.verbose <= 0:
            return
        begins = f"Reusing prepared data {dataset_idx}"
        if written_after is not None:
            begins = f"Wrote training data in {shown.seconds - written_after:.1f} s"
        described = describe_rows(manifest)
        # The size is for information, so a store that cannot list its files ends no fit here.
        with contextlib.suppress(OSError):
            described += f", {format_size(dataset_bytes(self.settings.store, dataset_idx))}"
        shown.finish(f"{begins}: {described}.")

    def _show_start(self, run: Run, order: ReadOrder, num_ranks: int, trial: Trial) -> None:
        """Show the collectives and, for a new run, the learning rates."""
        if self.settings.verbose <= 0:
            return
        show_collectives(num_ranks, self.framework.collectives == "horovod")
        if run.newest is None:
            factor = order.canonical_shards if self.settings.scale_learning_rate else 1
            show_learning_rates(self.framework.learning_rates(trial), factor)


def _require_prepared(dataset_idx: str, manifest: DatasetManifest, names: Iterable[str]) -> None:
    """Check that a prepared dataset has some columns.

    Raises
    ------
    ColumnError
        If it lacks one.
    """
    prepared = [column.name for column in manifest.columns]
    for name in names:
        if name not in prepared:
            raise ColumnError(
                f"The prepared dataset {dataset_idx!r} has no column {name!r}; its columns are "
                f"{', '.join(prepared)}.",
                column=name,
                remedy="Pass the column to prepare_data as well.",
            )


def _first_rows(dataset: DataFrame, specs: Sequence[ColumnSpec]) -> Columns | None:
    """Return the first rows of a DataFrame, or None if there are too few or some hold nulls."""
    columns = dataset.select(*(quoted(spec.name) for spec in specs))
    rows: Any = columns.limit(DRY_RUN_ROWS).toPandas()
    if len(rows) < DRY_RUN_ROWS or rows.isna().any(axis=None):
        return None
    return {spec.name: _stack(rows[spec.name], spec) for spec in specs}


def _stack(series: Any, spec: ColumnSpec) -> Array:
    rows = [value.toArray() if hasattr(value, "toArray") else value for value in series]
    return np.stack([np.asarray(row, spec.dtype) for row in rows])
