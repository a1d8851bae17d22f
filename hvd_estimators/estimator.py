"""The base of all estimators: what they have in common, written once. Runs on the driver."""

from __future__ import annotations

import abc
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.exceptions import HvdEstimatorsError, ParamError, ResultsError, ShapeError
from hvd_estimators.launch.backend import Backend
from hvd_estimators.launch.foreign import as_backend
from hvd_estimators.launch.jobs import jobs_on
from hvd_estimators.loading.order import order_warning
from hvd_estimators.loading.sharding import ShardPlan, plan_shards
from hvd_estimators.loading.spec import DataSpec, ReaderOptions
from hvd_estimators.loading.transformation import Transformation
from hvd_estimators.model import HorovodModel
from hvd_estimators.params.classification import ClassificationParams
from hvd_estimators.params.grids import GridParams
from hvd_estimators.params.ranks import RankParams
from hvd_estimators.params.reading import ReadingParams
from hvd_estimators.params.runs import RunParams
from hvd_estimators.params.training import TrainingParams
from hvd_estimators.params.transformation import TransformationParams
from hvd_estimators.params.writing import WritingParams
from hvd_estimators.parquet.columns import Array, Columns
from hvd_estimators.parquet.discovery import first_rows, read_manifest
from hvd_estimators.parquet.manifest import ColumnSpec, DatasetManifest
from hvd_estimators.prepare.column_names import quoted, require_columns
from hvd_estimators.prepare.dataframe import load_manifest, prepare_data
from hvd_estimators.prepare.reuse import hold
from hvd_estimators.prepare.schema import known_columns
from hvd_estimators.progress import show_progress
from hvd_estimators.runs import in_use
from hvd_estimators.spec import TrainResult, TrainSpec
from hvd_estimators.store import Store
from hvd_estimators.training.handover import Handover, Trainer, train_stored

__all__ = ["DRY_RUN_ROWS", "HorovodEstimator"]

logger = logging.getLogger(__name__)

FittedModel = TypeVar("FittedModel", bound=HorovodModel)

# Not a width that models often have, lest rows and columns be taken for each other.
DRY_RUN_ROWS = 11


class HorovodEstimator(
    RunParams,
    TrainingParams,
    RankParams,
    WritingParams,
    ReadingParams,
    TransformationParams,
    ClassificationParams,
    GridParams,
):
    """Base of the estimators."""

    # What opens a trained state, for messages.
    _state_reader = "the framework"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.setParams(**kwargs)

    def fit_on_parquet(
        self, params: Mapping[Any, Any] | None = None, dataset_idx: str | None = None
    ) -> HorovodModel:
        """Train on Parquet files that are there already.

        Parameters
        ----------
        params : dict, optional
            Param to value, in the place of what is set.
        dataset_idx : str, optional
            What `prepare_data` yielded. Default: the files at the store's train path, and at its
            validation path if ``validation`` is set (to anything).

        Returns
        -------
        HorovodModel
            The trained model.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        backend = self._ready_backend()
        store: Store = self.getOrDefault("store")
        if dataset_idx is not None:
            with hold(dataset_idx):
                manifest = load_manifest(store, dataset_idx)
                if self.getOrDefault("validation") and manifest.validation is None:
                    raise ParamError(
                        f"validation: found {self.getOrDefault('validation')!r}, but the dataset "
                        f"{dataset_idx!r} has no validation part. Pass validation to prepare_data "
                        "as well, or leave it out here."
                    )
                return self._train(manifest, backend)
        has_validation = bool(self.getOrDefault("validation"))
        manifest = read_manifest(
            store,
            store.get_train_data_path(),
            store.get_val_data_path() if has_validation else None,
            self._needed_columns(),
            allow_text=self._transformation() is not None or self._text_cols(),
        )
        return self._train(manifest, backend)

    def _fit(self, dataset: DataFrame) -> HorovodModel:
        """Write the rows as Parquet, train on them, and return the model."""
        backend = self._ready_backend()
        with contextlib.ExitStack() as stack:
            with jobs_on(dataset):
                trial = self._check_frame(dataset)
                prepared = prepare_data(
                    backend.num_processes(),
                    self.getOrDefault("store"),
                    dataset,
                    label_columns=self.getOrDefault("label_cols"),
                    feature_columns=self._all_feature_cols(),
                    validation=self.getOrDefault("validation"),
                    sample_weight_col=self.getOrDefault("sample_weight_col"),
                    compress_sparse=self.getOrDefault("compress_sparse_cols"),
                    partitions_per_process=self.getOrDefault("partitions_per_process"),
                    verbose=self.getOrDefault("verbose"),
                    random_seed=self.getOrDefault("random_seed"),
                    check_finite=self.getOrDefault("check_finite"),
                    allow_text=self._transformation() is not None or self._text_cols(),
                    # Who does not shuffle counts on the order of the rows.
                    shuffle_on_write=self.getOrDefault("shuffle")
                    and self.getOrDefault("shuffle_on_write"),
                )
                dataset_idx = stack.enter_context(prepared)
            manifest = load_manifest(self.getOrDefault("store"), dataset_idx)
            return self._train(manifest, backend, trial)

    def _ready_backend(self) -> Backend:
        """Check everything that needs no data, and return the backend."""
        self._check_params()
        backend = as_backend(self._get_or_create_backend())
        store: Store = self.getOrDefault("store")
        backend.check()
        store.check()
        backend.check_store(store)
        return backend

    def _check_params(self) -> None:
        """Check the params together; a framework's estimator adds its own checks."""
        self._check_other_names()
        for name in ("store", "model", "feature_cols", "label_cols"):
            value = self.getOrDefault(name)
            if value is None or (isinstance(value, list) and not value):
                raise ParamError(f"{name} is not set. Set {name}.")
        if not isinstance(self.getOrDefault("store"), Store):
            raise ParamError(
                f"store: expected a Store, found {self.getOrDefault('store')!r}. "
                "Set Store.create(prefix)."
            )
        weights, labels = self.getOrDefault("loss_weights"), self.getOrDefault("label_cols")
        if isinstance(weights, list) and len(weights) != len(labels):
            raise ParamError(
                f"loss_weights: expected one per label, {len(labels)}, found {len(weights)}."
            )
        self._check_classification(len(labels))
        self._check_reading()
        self._transformation()
        run_id = self.getOrDefault("run_id")
        if run_id is not None:
            self.getOrDefault("store").run_paths(run_id)

    def _check_frame(self, dataset: DataFrame) -> Any:
        """Try the model on zeros, where the schema tells all shapes; certain errors end here.

        Returns
        -------
        object or None
            What `_dry_run` returned; None where the first rows that are written are to be tried.
        """
        for name in ("feature_cols", "label_cols", "sample_weight_col"):
            columns = self.getOrDefault(name)
            if columns:
                require_columns(dataset, name, [columns] if isinstance(columns, str) else columns)
        if self._transformation() is not None or not self.getOrDefault("dry_run"):
            return None  # the first rows that are written tell what becomes of them
        known = known_columns(dataset, self._needed_columns(), self._text_cols())
        if known is None:
            return None
        zeros = {spec.name: _zeros(spec) for spec in known}
        try:
            return self._dry_run(zeros)
        except ShapeError:
            # Zeros may be no valid input of the model: the first real rows decide.
            needed = dataset.select(*map(quoted, self._needed_columns()))
            rows: Any = needed.limit(DRY_RUN_ROWS).toPandas()
            if len(rows) == DRY_RUN_ROWS and not rows.isna().any(axis=None):
                return self._dry_run({spec.name: _stack(rows[spec.name], spec) for spec in known})
            return None

    @abc.abstractmethod
    def _dry_run(self, columns: Columns) -> Any:
        """Run a few rows through model and loss; raise `ShapeError` where they do not fit.

        Not to be run where the param ``dry_run`` is false. Returns what `_train` needs to know, and
        not None.
        """

    @abc.abstractmethod
    def _train(
        self, manifest: DatasetManifest, backend: Backend, trial: Any = None
    ) -> HorovodModel:
        """Train on a dataset and return the model; ``trial`` is what `_dry_run` returned before."""

    def _common_spec(
        self, data: DataSpec, prefix: str, fingerprint: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the fields of `TrainSpec`; ``prefix`` starts the name of a new run.

        Raises
        ------
        ParamError
            If the run is there already, and of something else.
        """
        get = self.getOrDefault
        return {
            "data": data,
            "store": get("store"),
            "run": self._run_paths(prefix, fingerprint),
            "epochs": get("epochs"),
            "random_seed": get("random_seed"),
            "scale_learning_rate": get("scale_learning_rate"),
            "backward_passes_per_step": get("backward_passes_per_step"),
            "gradient_compression": get("gradient_compression"),
            "use_gpu": get("use_gpu"),
            "mp_start_method": get("mp_start_method"),
            "callbacks": tuple(get("callbacks")),
            "verbose": get("verbose"),
        }

    def _trained_state(self, results: Sequence[TrainResult]) -> bytes:
        """Return what rank 0 trained, once it is certain that the others agree."""
        if len({result.weights_digest for result in results}) > 1:
            raise HvdEstimatorsError(
                "The ranks ended with different weights. A callback, custom layer or "
                "train_minibatch_fn that treats ranks differently can cause that."
            )
        state = results[0].state
        if state is None:
            raise ResultsError(
                "Rank 0 returned no trained state. A backend has to return the ranks' results in "
                "the order of the ranks."
            )
        return state

    def _run(
        self,
        backend: Backend,
        train: Trainer,
        spec: TrainSpec,
        make_model: Callable[[Sequence[TrainResult]], FittedModel],
        env: Mapping[str, str | None] | None = None,
    ) -> FittedModel:
        """Run the trainer on every rank, showing progress, and make the model of the results."""
        with in_use(spec.store, spec.run), Handover(spec, self._state_reader) as handover:
            with (
                handover.naming_what_is_kept(trained=False),
                show_progress(spec.verbose) as on_event,
            ):
                call = handover.put(train)
                results = backend.run(
                    train_stored, args=(call,), kwargs={}, env=env, on_event=on_event
                )
            with handover.naming_what_is_kept(trained=True):
                return make_model(handover.read(results))

    def _data_spec(self, manifest: DatasetManifest, num_ranks: int) -> DataSpec:
        """Plan who reads what, and how."""
        get = self.getOrDefault
        seed = get("random_seed")
        needed = set(self._needed_columns())
        order_seed = secrets.randbits(31) if seed is None else seed
        buffer_bytes = get("shuffle_buffer_size")
        columns = tuple(column for column in manifest.columns if column.name in needed)
        groups = manifest.train.row_groups
        plan = plan_shards(
            groups,
            num_ranks,
            seed=order_seed if get("shuffle") else None,
            # What was written in random order can be read one row group after another.
            open_bytes=0 if manifest.shuffled else buffer_bytes,
        )
        if get("shuffle") and not (manifest.shuffled or get("inmemory_cache_all")):
            warning = order_warning(groups, plan, columns, buffer_bytes)
            if warning:
                logger.warning(warning)
        val_plan: ShardPlan | None = None
        if manifest.validation is not None:
            val_plan = plan_shards(manifest.validation.row_groups, num_ranks, allow_empty=True)
        batch_size = get("batch_size")
        val_batch_size = get("val_batch_size") or batch_size
        return DataSpec(
            columns=columns,
            train_path=manifest.train.path,
            val_path=manifest.validation.path if manifest.validation else None,
            train_plan=plan,
            val_plan=val_plan,
            num_ranks=num_ranks,
            feature_cols=tuple(get("feature_cols")),
            label_cols=tuple(get("label_cols")),
            sample_weight_col=get("sample_weight_col"),
            batch_size=batch_size,
            val_batch_size=val_batch_size,
            train_steps_per_epoch=get("train_steps_per_epoch") or plan.steps(batch_size),
            validation_steps_per_epoch=get("validation_steps_per_epoch")
            or (val_plan.steps(val_batch_size) if val_plan else 0),
            random_seed=order_seed,
            data_module=get("data_module"),
            options=ReaderOptions(
                **self._reading_options(),
                categorical_cols=get("categorical_cols"),
                continuous_cols=get("continuous_cols"),
                transform_fn=get("transformation_fn"),
                transformation=self._transformation(),
                store=get("store"),
                storage_options=get("store").storage_options,
                verbose=get("verbose"),
            ),
        )

    def _transformation(self) -> Transformation | None:
        """Return what the readers make of rows; None if nothing."""
        get = self.getOrDefault
        weight = get("sample_weight_col")
        return self._make_transformation(
            (*get("feature_cols"), *get("label_cols"), *([weight] if weight else [])),
            tuple(self._text_cols()),
        )

    def _text_cols(self) -> Mapping[str, bool]:
        """Return the feature columns that may be text, to whether bytes are text in them, too.

        A framework's estimator tells, where models take text.
        """
        return {}

    def _first_rows(self, manifest: DatasetManifest) -> Columns:
        """Return the first rows of a dataset as a model gets them."""
        rows = first_rows(self.getOrDefault("store"), manifest, DRY_RUN_ROWS)
        transformation = self._transformation()
        return rows if transformation is None else transformation(rows)


def _zeros(spec: ColumnSpec) -> Array:
    shape = (DRY_RUN_ROWS, *spec.shape)
    return np.full(shape, "", object) if spec.kind == "text" else np.zeros(shape, spec.dtype)


def _stack(series: Any, spec: ColumnSpec) -> Array:
    rows = [value.toArray() if hasattr(value, "toArray") else value for value in series]
    return np.stack([np.asarray(row, spec.dtype) for row in rows])
