"""`KerasEstimator`: trains a Keras model on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
from pyspark.sql import DataFrame

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.run import RunResults, named
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.history import as_keras_history
from hvd_estimators.keras.backend import model_optimizers
from hvd_estimators.keras.collectives import reductions_of
from hvd_estimators.keras.compile_args import CompileSettings, check_classes
from hvd_estimators.keras.dry_run import DryRun, check_batches
from hvd_estimators.keras.fingerprint import model_fingerprint
from hvd_estimators.keras.inputs import input_keys, input_structure, kept_random_state
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.model_file import load_weights
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.keras.serialization import ModelPayload
from hvd_estimators.keras.trainer import KerasTrainSpec, train
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.run_state import check_state
from hvd_estimators.training.spec import TrainSpec

__all__ = ["KerasEstimator"]


@dataclass(frozen=True, kw_only=True)
class _KerasTrial(Trial):
    """What a dry run found out, and the copies that it was made with.

    Attributes
    ----------
    dry_run : DryRun
        Holds the model, built and compiled, and how columns become tensors.
    settings : CompileSettings
        What the model is compiled with.
    """

    dry_run: DryRun
    settings: CompileSettings


class KerasEstimator(KerasParams):
    """Trains a Keras 3 model on a DataFrame, with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks with ``Model.fit``, and returns a `KerasModel`. Each feature column is one input of the
    model, reshaped to what the model declares (a number per row is ``(rows, 1)``). Columns and
    inputs pair by name if each input has the name of a feature column, and by position otherwise.
    Each label column is compared to one output: to that of its name, where the model returns a dict
    or where the output layers are named after the labels, and by position otherwise. Outputs of a
    dict that are no labels are left alone. The given model and optimizer are left as they are. Runs
    on the driver; Keras has to run on TensorFlow.

    An epoch trains on every row once. The learning rate is that of one rank: training applies it
    multiplied by the number of ranks, and what callbacks and schedules set counts in the same way.
    The gradient of a step is that of the loss over the rows of all ranks. Callbacks run on every
    rank and see what was measured on all of them; those that write files (TensorBoard,
    ModelCheckpoint, CSVLogger, and your own with an attribute ``rank_zero_only = True``) run on
    rank 0; relative paths of a ModelCheckpoint and a CSVLogger are below the run's logs.
    ``stop_training`` ends training after the epoch in which a callback sets it.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError, DependencyError
        Before training, if params, columns, shapes, rows, store, cluster or Keras will not do.
    WorkerFailedError
        If a rank fails.
    """

    _framework = "keras"

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs, -1 for what is not fixed."""
        model = self.getOrDefault("model")
        return tuple(  # type: ignore[return-value]
            [[-1 if size is None else size for size in tensor.shape] for tensor in side]
            for side in (model.inputs, model.outputs)
        )

    def _try_frame(self, dataset: DataFrame) -> Trial | None:
        # What needs no rows.
        self._new_dry_run()
        return super()._try_frame(dataset)

    def _dry_run(self, columns: Columns) -> Trial:
        dry_run, settings = self._new_dry_run()
        dry_run.run(columns)
        self._check_monitors(dry_run)
        return _KerasTrial(dry_run.output_shapes, dry_run=dry_run, settings=settings)

    def _without_dry_run(self, manifest: DatasetManifest) -> Trial:
        dry_run, settings = self._new_dry_run()
        dry_run.look_at(self._first_rows(manifest))
        self._check_monitors(dry_run)
        return _KerasTrial(dry_run.output_shapes, dry_run=dry_run, settings=settings)

    def _check_monitors(self, dry_run: DryRun) -> None:
        dry_run.check_monitors("callbacks", self.getOrDefault("callbacks"))
        checkpoint = self.getOrDefault("checkpoint_callback")
        if checkpoint is not None:
            dry_run.check_monitors("checkpoint_callback", [checkpoint])

    def _check_trial(self, trial: Any, manifest: DatasetManifest) -> None:
        super()._check_trial(trial, manifest)
        if self.getOrDefault("class_weight"):
            (label,) = trial.dry_run.tensors.label_fields()
            check_classes(label.column, label.array(self._first_rows(manifest)[label.column]))

    def _model_identity(self, trial: Any) -> dict[str, Any]:
        other_rate = self.getOrDefault("learning_rate") is not None
        identity = model_fingerprint(trial.dry_run.model, other_rate)
        model, columns = trial.dry_run.model, self.getOrDefault("feature_cols")
        if input_structure(model, columns) != input_structure(model, columns, by_name=False):
            # A run of an earlier version, which notes no names, went by position.
            identity["columns of the inputs"] = [tensor.name for tensor in model.inputs]
        return {**identity, "loss": named(trial.settings.loss)}

    def _check_checkpoint(self, path: str, trial: Any) -> None:
        if not all(optimizer.built for optimizer in model_optimizers(trial.dry_run.model)):
            raise ParamError(
                f"run_id: {self.getOrDefault('run_id')!r} cannot be resumed, as optimizers among "
                "the model's attributes are not built and would lose their state. Set another "
                "run_id, or call build() of each optimizer with its variables before fit()."
            )
        check_state(self.getOrDefault("store"), path)

    def _check_spec(self, common: TrainSpec, trial: Any) -> None:
        check_batches(trial.dry_run.model, common.data)
        reductions_of(trial.dry_run.model, common.buffer_reduction)
        if common.data.train_plan.num_shards > 1:
            trial.dry_run.check_metrics()

    def _make_spec(self, common: TrainSpec, trial: Any) -> TrainSpec:
        get = self.getOrDefault
        return KerasTrainSpec(
            **vars(common),
            # After the dry run, which builds a model that was not built.
            model=ModelPayload(trial.dry_run.model, get("custom_objects")),
            tensors=trial.dry_run.tensors,
            weight_by_samples=self._weights_by_samples(trial.settings),
            checkpoint_callback=get("checkpoint_callback"),
            floatx=keras.config.floatx(),
            dtype_policy=keras.dtype_policies.serialize(keras.config.dtype_policy()),
            prefetch=get("tensorflow_dataset_prefetch_buffer_size"),
        )

    def _rank_function(self) -> Trainer:
        return train

    def _rank_environment(self) -> Mapping[str, str | None]:
        return {"KERAS_BACKEND": "tensorflow", **self.getOrDefault("backend_env")}

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> KerasModel:
        spec: KerasTrainSpec = run_results.spec
        state = run_results.state
        with kept_random_state():
            model = spec.model.load()
        load_weights(model, state.path)
        state.close()
        fitted = self.get_model_class()(
            **self._get_model_kwargs(
                model=model,
                history=as_keras_history(run_results.history),
                run_id=run_id,
                metadata=metadata,
                floatx=keras.config.floatx(),
            )
        )
        fitted._set(_input_keys=input_keys(model, spec.tensors.inputs))
        return fitted

    def get_model_class(self) -> type[KerasModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""
        return KerasModel

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        floatx = fitted.pop("floatx")
        return {
            "custom_objects": self.getOrDefault("custom_objects"),
            "_floatx": floatx,
            **super()._get_model_kwargs(**fitted),
        }

    def _new_dry_run(self) -> tuple[DryRun, CompileSettings]:
        """Return a dry run of a new copy of the model, and what the copy is compiled with."""
        get = self.getOrDefault
        settings = self._compile_settings()

        def compile_model(model: keras.Model, outputs: Outputs | None) -> None:
            with kept_random_state():
                settings.apply(model, outputs)

        dry_run = DryRun(
            self._training_model(),
            get("feature_cols"),
            get("label_cols"),
            get("sample_weight_col"),
            get("label_shapes"),
            compile_model,
            get("class_weight"),
            self._training_model,
            compares=settings.compares,
            selection=get("outputs"),
            original=get("model"),
        )
        return dry_run, settings
