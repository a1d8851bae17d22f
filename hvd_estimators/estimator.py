"""Base class of all estimators, with the steps of a fit. Runs on the driver."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.exact import check_range, limits
from hvd_estimators.data.manifest import ColumnSpec, DatasetManifest
from hvd_estimators.exceptions import (
    ColumnError,
    ParamError,
    ShapeError,
    StoreError,
    WorkerFailedError,
)
from hvd_estimators.fitting.hooks import EstimatorHooks
from hvd_estimators.fitting.progress import (
    StageRow,
    describe_rows,
    format_size,
    show_collectives,
    show_learning_rates,
    show_progress,
)
from hvd_estimators.fitting.record import RunRecord, hyperparameters, noted_params, start_note
from hvd_estimators.fitting.restarts import Launch, Restarts, ending_by_sigterm, warming_up
from hvd_estimators.fitting.run import ReadOrder, Run, RunResults
from hvd_estimators.fitting.run_loggers import RunLoggers
from hvd_estimators.fitting.stores import ParquetFiles, Paths, configured_store, find_files
from hvd_estimators.fitting.tensorboard import TensorBoardLogger
from hvd_estimators.fitting.trial import DRY_RUN_ROWS, Trial, try_batches, zeros
from hvd_estimators.inference.batch import is_scalar
from hvd_estimators.launch.backend import Backend, as_backend
from hvd_estimators.launch.cluster.connect import current_cluster
from hvd_estimators.launch.cluster.jobs import describing, jobs_on, spark_job, spread_over_tasks
from hvd_estimators.launch.gpus import HIDDEN
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.loading.readers import PlannedDataModule
from hvd_estimators.loggers import LoggedRun, Logger
from hvd_estimators.model import PREDICTION, HorovodModel
from hvd_estimators.params import DeclaredParams
from hvd_estimators.prepare.dataframe import prepare_data
from hvd_estimators.prepare.datasets import (
    column_metadata,
    dataset_bytes,
    load_manifest,
    pin,
)
from hvd_estimators.prepare.schema import (
    is_frame,
    known_columns,
    quoted,
    require_columns,
    require_frame,
)
from hvd_estimators.store.checkpoints import CheckpointInfo, check_valid, find_newest_valid
from hvd_estimators.summary import TrainingSummary, find_best_epoch, selecting_metric
from hvd_estimators.training.call_transfer import CallTransfer
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from hvd_estimators.params.signatures import EstimatorSignatures
else:
    EstimatorSignatures = DeclaredParams


class HorovodEstimator(EstimatorHooks, EstimatorSignatures):
    """Base class of the estimators.

    A fit checks the params, prepares the data, tries the model, plans the training, launches the
    ranks and wraps the result in a model. A framework's estimator implements the hooks of
    `EstimatorHooks`.
    """

    # What most programs set; see `DeclaredParams`.
    _described_first = (
        *("num_proc", "store", "run_id", "model", "optimizer", "loss", "metrics"),
        *("feature_cols", "label_cols", "validation", "batch_size", "epochs", "callbacks"),
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.setParams(**kwargs)

    def fit_on_parquet(
        self,
        path: Paths | Mapping[Any, Any] | None = None,
        dataset_idx: str | None = None,
        *,
        validation_path: Paths | None = None,
        params: Mapping[Any, Any] | None = None,
    ) -> HorovodModel:
        """Train on existing Parquet files.

        Parameters
        ----------
        path : str, PathLike or sequence of them, optional
            Paths or URLs of folders or files with the training rows, all on one filesystem. A path
            without a scheme is on the store's filesystem. Default: the store's train path, and its
            validation path if ``validation`` is set to any true value. A dict is ``params``.
        dataset_idx : str, optional
            Dataset index from `prepare_data`, instead of a path.
        validation_path : str, PathLike or sequence of them, optional
            Paths or URLs of the validation rows.
        params : dict, optional
            Values by param; they override the params of this estimator.

        Returns
        -------
        HorovodModel
            The trained model.

        Raises
        ------
        ParamError
            If a param or a path is invalid.
        StoreError, ColumnError, DataError
            If there are no such files, if they lack a column, or if it contains nulls.
        """
        if isinstance(path, Mapping):
            path, params = None, path
        if params is not None and not isinstance(params, Mapping):
            raise ParamError(f"params: expected a dict of params, found {params!r}.")
        if dataset_idx is not None and (path is not None or validation_path is not None):
            raise ParamError(
                f"dataset_idx: found {dataset_idx!r} and a path. Pass the index of a dataset, or "
                "the paths of files."
            )
        params = {**(params or {})}
        if validation_path is not None:
            params[self.getParam("validation")] = True
        if params:
            changed = self.copy(params)
            return changed._fit_on_parquet(path, dataset_idx, validation_path)
        return self._fit_on_parquet(path, dataset_idx, validation_path)

    def _fit_on_parquet(
        self, path: Paths | None, dataset_idx: str | None, validation_path: Paths | None
    ) -> HorovodModel:
        with self._naming_as_set():
            estimator = self._with_objects()
            if dataset_idx is not None:
                return estimator._fit_on_dataset(dataset_idx)
            return estimator._fit_on_files(estimator._find_files(path, validation_path))

    def _find_files(self, path: Paths | None, validation_path: Paths | None) -> ParquetFiles:
        """Return the existing files to train on."""
        if path is None and self.getOrDefault("store") is None and configured_store() is None:
            raise ParamError(
                "path is not set. Pass the path or URL of the Parquet files, or set store to "
                "Store.create(prefix, train_path=...)."
            )
        validation, store = self.getOrDefault("validation"), self._get_store()
        if validation and validation_path is None:
            if path is not None:
                raise ParamError(
                    f"validation: found {validation!r}, but existing files are not split. Pass the "
                    "path of the validation files as validation_path, or leave validation out."
                )
            validation_path = store.get_val_data_path()
        files = find_files(store, path, validation_path)
        module = self.getOrDefault("data_module")
        reads_one = isinstance(module, type) and not issubclass(module, PlannedDataModule)
        if reads_one and max(len(files.train), len(files.validation)) > 1:
            raise ParamError(
                f"path: found {len(files.train)} paths for training and {len(files.validation)} "
                f"for validation, and the data_module {module.__name__} reads one. Pass one "
                "folder, or leave data_module out."
            )
        return files

    def _fit_on_files(self, files: ParquetFiles) -> HorovodModel:
        backend, store = self._ready_backend(), self._get_store()
        is_default = files.train == (store.get_train_data_path(),)
        if is_default and not files.validation and store.exists(store.get_val_data_path()):
            logger.warning(
                "validation is not set: the files in %s are not used. Set it, to True for "
                "example, to validate on them.",
                store.get_val_data_path(),
            )
        doing = "Reading the footers of the Parquet files"
        in_tasks = functools.partial(spread_over_tasks, description=doing)
        reading = self._showing_stage(doing)
        with reading as shown, self._naming_params():
            manifest = read_manifest(
                files.store,
                files.train,
                files.validation,
                self._needed_columns(),
                allow_text=self._allowed_text(),
                spread=in_tasks if isinstance(backend, SparkBackend) else None,
            )
            shown.finish(f"Training on existing files: {describe_rows(manifest)}.")
        return self._train(manifest, backend)

    def _fit_on_dataset(self, dataset_idx: str) -> HorovodModel:
        backend = self._ready_backend()
        store, validation = self._get_store(), self.getOrDefault("validation")
        reading = self._showing_stage(f"Reading the manifest of prepared data {dataset_idx}")
        with pin(store, dataset_idx), reading as shown:
            manifest = load_manifest(store, dataset_idx)
            if validation and manifest.validation is None:
                raise ParamError(
                    f"validation: found {validation!r}, but the dataset {dataset_idx!r} has no "
                    "validation part. Pass validation to prepare_data as well, or leave it out "
                    "here."
                )
            with self._naming_params():
                _require_prepared(dataset_idx, manifest, self._needed_columns())
            self._show_prepared(shown, dataset_idx, manifest)
            return self._train(manifest, backend)

    def _fit(self, dataset: DataFrame) -> HorovodModel:
        """Write the DataFrame as Parquet, train on it, and return the model."""
        with self._naming_as_set():
            require_frame("dataset", dataset)
            if is_frame(validation := self.getOrDefault("validation")):
                require_frame("validation", validation)
            return self._with_objects()._fit_frame(dataset)

    def _fit_frame(self, dataset: DataFrame) -> HorovodModel:
        return self._with_class_labels(_numbers_in(dataset))._fit_rows(dataset)

    def _fit_rows(self, dataset: DataFrame) -> HorovodModel:
        written_after = None
        with contextlib.ExitStack() as stack:
            with self._showing_stage("Checking params, store and task slots") as shown:

                def write(**options: Any) -> contextlib.AbstractContextManager[str]:
                    nonlocal written_after
                    written_after, shown.doing = shown.seconds, "Writing training data"
                    return prepare_data(**options)

                backend = self._ready_backend()
                self._check_monitored(self.getOrDefault("validation") is not None)
                with self._naming_params():
                    self._check_columns(dataset)
                # Executors import the framework while the driver tries the model: the task slots
                # are free until the rows are written.
                with jobs_on(dataset), self._warming_up(backend), self._naming_params():
                    shown.doing = "Trying the model on some rows"
                    trial = self._try_frame(dataset)
                    num_shards = self._shards_of_named_run(backend.num_processes())
                    shown.doing = "Waiting for data that another fit writes"
                    prepared = self._prepare(dataset, num_shards, write)
                    run_id = self.getOrDefault("run_id")
                    written = "Write training data" + (f" of run {run_id}" if run_id else "")
                    with describing(written), spark_job(current_cluster()):
                        dataset_idx = stack.enter_context(prepared)
                manifest = load_manifest(self._get_store(), dataset_idx)
                self._show_prepared(shown, dataset_idx, manifest, written_after)
            return self._train(manifest, backend, trial)

    def _showing_stage(self, doing: str) -> StageRow:
        return StageRow(doing, self.getOrDefault("verbose"))

    def _show_prepared(
        self,
        shown: StageRow,
        dataset_idx: str,
        manifest: DatasetManifest,
        written_after: float | None = None,
    ) -> None:
        """Show the size of a dataset, and how long it took to write if this fit wrote it."""
        if self.getOrDefault("verbose") <= 0:
            return
        begins = f"Reusing prepared data {dataset_idx}"
        if written_after is not None:
            begins = f"Wrote training data in {shown.seconds - written_after:.1f} s"
        described = describe_rows(manifest)
        # The size is for information, so a store that cannot list its files ends no fit here.
        with contextlib.suppress(OSError):
            described += f", {format_size(dataset_bytes(self._get_store(), dataset_idx))}"
        shown.finish(f"{begins}: {described}.")

    def _train(
        self, manifest: DatasetManifest, backend: Backend, trial: Trial | None = None
    ) -> HorovodModel:
        """Train on a dataset and return the model.

        ``trial`` is the result of a dry run on the DataFrame, if there was one.
        """
        numbers = [column.name for column in manifest.columns if column.kind == "scalar"]
        return self._with_class_labels(numbers)._train_on(manifest, backend, trial)

    def _train_on(
        self, manifest: DatasetManifest, backend: Backend, trial: Trial | None
    ) -> HorovodModel:
        self._check_weights(manifest)
        with self._naming_params():
            tried = self._try_rows(manifest) if trial is None else trial
        self._check_trial(tried, manifest)
        with self._naming_params():
            self._check_numbers(manifest, tried)
        self._check_monitored(manifest.validation is not None)
        fingerprint = self._fingerprint(manifest, self._model_identity(tried))
        given = self.getOrDefault("random_seed")
        seed = secrets.randbits(31) if given is None else given
        with self._make_run(self._run_paths(fingerprint)) as run:
            run.load().check_fingerprint()
            self._check_resumable(run, tried)
            order = run.row_order or ReadOrder(backend.num_processes(), seed)

            if self.getOrDefault("verbose") > 0:
                show_collectives(backend.num_processes(), self._uses_horovod())
            if run.newest is None and self.getOrDefault("verbose") > 0:
                scales = self.getOrDefault("scale_learning_rate")
                factor = order.canonical_shards if scales else 1
                show_learning_rates(self._learning_rates(tried), factor)

            def spec_for(num_ranks: int) -> TrainSpec:
                common = self._common_spec(manifest, num_ranks, run.paths, order)
                data = common.data.with_min_batch_rows(self._min_batch_rows(tried))
                common = replace(common, data=data)
                self._check_spec(common, tried)
                return self._make_spec(common, tried)

            try:
                return self._launch(run, backend, spec_for, tried, manifest)
            except WorkerFailedError as error:
                # The message holds the rank's traceback. The driver's frames would bury it.
                raise error.with_traceback(None) from None

    def _check_weights(self, manifest: DatasetManifest) -> None:
        """Check that each sample weight is one number, unless a transformation creates them."""
        name = self.getOrDefault("sample_weight_col")
        kinds = {column.name: column.kind for column in manifest.columns}
        if self._transformation() is None and kinds.get(name, "scalar") != "scalar":
            raise ColumnError(
                f"sample_weight_col: expected a column of numbers, found {name!r}, whose rows are "
                "several numbers each. Set a column with one for each row."
            )

    def _check_numbers(self, manifest: DatasetManifest, trial: Trial) -> None:
        """Check that the model's tensors hold the numbers of the columns without a change.

        A transformation may change the numbers, so they are not checked then.
        """
        if self._transformation() is not None:
            return
        inputs, columns = self._input_columns(), {spec.name: spec for spec in manifest.columns}
        used = {*inputs.names, *self._needed_columns()}
        for spec in inputs.specs(manifest.columns):
            if spec.name not in used:
                continue
            members = [columns[name] for name in inputs.matrices.get(spec.name, (spec.name,))]
            target = self._tensor_dtype(spec.name, spec.dtype, trial)
            for member in members:
                is_integer = np.dtype(member.dtype).kind in "iu"
                if member.range is None and is_integer and limits(member.dtype, target):
                    logger.warning(
                        "The files do not state the range of column %r, which is read as %s. "
                        "Larger integers than it holds would lose digits.",
                        member.name,
                        target,
                    )
                # A matrix of integers and floats holds floats.
                for dtype in dict.fromkeys((spec.dtype, target)):
                    check_range(
                        member, dtype, spec.dtype, functools.partial(self._dtype_remedy, spec.name)
                    )

    def _check_monitored(self, has_validation: bool) -> None:
        """Check that training measures the monitored metrics, if the metric names are known."""
        names, validates = self._metric_names(), has_validation or self._validates_itself()
        for what, monitor in self._monitors():
            self._check_measured(what, monitor, names, validates)

    def _check_resumable(self, run: Run, trial: Trial) -> None:
        """Check that the ranks can resume from one of the run's checkpoints."""

        def check(info: CheckpointInfo) -> None:
            try:
                self._check_checkpoint(info.path, trial)
            except StoreError:
                check_valid(run.store, info)
                raise

        find_newest_valid(run.store, run.paths, check, run.checkpoints)

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
        spec = spec_for(backend.num_processes())
        run.check_reading(spec.data)
        with CallTransfer(spec, self._state_reader) as handover:
            with handover.describing_saved_state(trained=False):
                launch = Launch(run, handover, self._rank_function(), spec_for, spec)
            if run.checkpoints:
                handover.delete_others()
            started = time.monotonic()
            with (
                ending_by_sigterm(),
                self._record(run, spec, trial) as record,
                run.without_orphans(),
            ):
                with (
                    handover.describing_saved_state(trained=False),
                    show_progress(spec, run.newest) as shown,
                ):
                    limit, least = map(self.getOrDefault, ("max_restarts", "min_num_proc"))
                    restarts = Restarts(run, spec, limit, least, record.restarted)
                    handler = restarts.progress.handler(record.handler(shown))
                    env = {
                        **({} if spec.use_gpu else HIDDEN),
                        **restarts.environment(),
                        **self._rank_environment(),
                    }
                    results = restarts.launch(backend, lambda on: launch(on, env, handler))
                seconds = time.monotonic() - started
                with handover.describing_saved_state(trained=True):
                    run_results = RunResults(handover.read(results), launch.spec)
                    model = self._wrap(run_results, trial)
                    model._summary = self._summary(run_results, seconds, len(restarts.failures))
                    record.complete(
                        run_results.history,
                        model,
                        run_results[0].stopped,
                        lambda: self._example_rows(manifest),
                    )
                    return model

    def _summary(self, results: RunResults, seconds: float, restarts: int) -> TrainingSummary:
        """Return the summary of a fit, see `TrainingSummary`."""
        data, val_plan = results.spec.data, results.spec.data.val_plan
        return TrainingSummary(
            run_id=results.spec.run.run_id,
            metrics=tuple(row for record in results.history for row in record.rows()),
            best_epoch=find_best_epoch(
                results.history,
                *selecting_metric(
                    self._monitor(),
                    self.getOrDefault("checkpoint_mode"),
                    self.getOrDefault("callbacks"),
                ),
            ),
            rows=data.train_plan.total_rows,
            validation_rows=0 if val_plan is None else val_plan.total_rows,
            num_ranks=data.num_ranks,
            seconds=seconds,
            restarts=restarts,
            stopped=results[0].stopped,
        )

    def _record(self, run: Run, spec: TrainSpec, trial: Trial) -> RunRecord:
        """Create the record of this fit, which is updated while the ranks train."""
        mlflow = self._mlflow_logger(noted_params(self, only_set=True))
        optional: list[Logger] = [] if mlflow is None else [mlflow]
        required = self.getOrDefault("loggers") if self.hasParam("loggers") else []
        logs = spec.run.logs_path
        if logs is not None and not self._ranks_log:
            optional.append(TensorBoardLogger(spec.store, logs, self._has_own_tensorboard()))
        logged = LoggedRun(
            run_id=run.paths.run_id,
            key=hashlib.sha256(run.paths.run_path.encode()).hexdigest()[:40],
            epoch=run.epochs_done,
            hyperparameters=hyperparameters(self, self._learning_rates(trial)),
        )
        loggers = RunLoggers(logged, required, optional, is_resumed=run.newest is not None)
        return RunRecord(run, start_note(self, run, spec), loggers, mlflow)

    def _wrap(self, results: RunResults, trial: Trial) -> HorovodModel:
        """Create the fitted model from the ranks' results."""
        spec: TrainSpec = results.spec
        model = self._create_model(results, spec.run.run_id, column_metadata(spec.data.columns))
        shapes = trial.output_shapes
        if shapes is None:
            shapes = results[0].output_shapes
        if shapes is not None and not model.isSet("output_shapes"):
            model._set(output_shapes=[list(shape) for shape in shapes])
        self._set_prediction(model)
        return model

    def _set_prediction(self, model: HorovodModel) -> None:
        """Let a model add the column ``prediction`` by default, if it predicts one label."""
        shapes, labels = model.getOrDefault("output_shapes"), self.getOrDefault("label_cols")
        if self._upstream_names or not shapes or len(shapes) != 1 or len(labels) != 1:
            return
        shape = tuple(shapes[0])
        kind = self._outputs_are(shape)
        if kind is None or len(shape) > 1 or (kind == "values" and not is_scalar(shape)):
            return
        model._setDefault(outputs_are=kind, predictionCol=PREDICTION)

    def _ready_backend(self) -> Backend:
        """Run all checks that need no data, and return the backend."""
        self._check_params()
        self._check_sent()
        backend = as_backend(self._get_or_create_backend())
        store = self._get_store()
        self._check_restarts(backend)
        backend.check()
        if self._uses_horovod():
            backend.check_horovod()
        store.check()
        backend.check_store(store)
        return backend

    def _warming_up(self, backend: Backend) -> contextlib.AbstractContextManager[None]:
        store, env = self._get_store(), self._rank_environment()
        return warming_up(backend, self._rank_function(), store, env)

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
        get = self.getOrDefault
        options: dict[str, Any] = {
            "num_processes": num_shards,
            "store": self._get_store(),
            "df": dataset,
            "label_columns": get("label_cols"),
            "feature_columns": self._all_feature_cols(),
            "validation": get("validation"),
            "sample_weight_col": get("sample_weight_col"),
            "compress_sparse": get("compress_sparse_cols"),
            "partitions_per_process": get("partitions_per_process"),
            "random_seed": get("random_seed"),
            "check_finite": get("check_finite"),
            "allow_text": self._allowed_text(),
            # Users who turn off shuffling rely on the order of the rows.
            "shuffle_on_write": get("shuffle") and get("shuffle_on_write"),
        }
        if self._shared_data is not None:
            return self._shared_data.acquire(options, write)
        return write(**options)

    def _allowed_text(self) -> bool | Mapping[str, bool]:
        return self._transformation() is not None or self._text_cols()

    def _check_columns(self, dataset: DataFrame) -> None:
        """Check that the DataFrame has the columns of the params, each once."""
        require_columns(dataset, "feature_cols", self._input_columns().columns)
        for name in ("label_cols", "sample_weight_col"):
            columns = self.getOrDefault(name)
            if columns:
                require_columns(dataset, name, [columns] if isinstance(columns, str) else columns)

    def _try_frame(self, dataset: DataFrame) -> Trial | None:
        """Try the model before the DataFrame is written, to fail early.

        If the schema determines all shapes, the model is tried on zeros. If zeros fail, the
        DataFrame's first rows decide.

        Returns
        -------
        Trial or None
            None if the model must be tried on the first written rows instead.
        """
        if self._transformation() is not None or not self._can_dry_run():
            return None  # only the written rows show the transformation's output
        specs = known_columns(dataset, self._needed_columns(), self._text_cols())
        if specs is None:
            return None
        # Zeros may be invalid input for the model. The first real rows decide and give the error.
        with contextlib.suppress(ShapeError):
            return self._dry_run(zeros(self._input_columns().specs(specs)))
        rows = _first_rows(dataset, specs)
        return None if rows is None else self._try(self._input_columns().stack(rows))

    def _try_rows(self, manifest: DatasetManifest) -> Trial:
        """Try the model on the first rows of a dataset."""
        if not self._can_dry_run():
            return self._without_dry_run(manifest)
        return self._try(self._first_rows(manifest))

    def _try(self, columns: Columns) -> Trial:
        return try_batches(self._dry_run, columns, self.getOrDefault("batch_size"))


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
                f"{', '.join(prepared)}. Pass the column to prepare_data as well."
            )


def _numbers_in(dataset: DataFrame) -> list[str]:
    """Return the columns with one number per row."""
    numbers = (T.NumericType, T.BooleanType)
    return [field.name for field in dataset.schema if isinstance(field.dataType, numbers)]


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
