"""`KerasEstimator`, which trains a Keras model on a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from pyspark.sql import DataFrame

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.keras.backend import (
    all_layers,
    has_own_step,
    kept_random_state,
    learning_rates,
    model_optimizers,
)
from hvd_estimators.keras.collectives import reductions_of
from hvd_estimators.keras.compile_args import CompileSettings
from hvd_estimators.keras.dry_run import DryRun, check_batches
from hvd_estimators.keras.losses import NO_TEST_LOSS, class_limit, losses_by_output
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.model_file import load_values
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.keras.serialization import ModelPayload
from hvd_estimators.keras.tensors import id_limits, input_keys
from hvd_estimators.keras.trainer import KerasTrainSpec, train
from hvd_estimators.keras.user_callbacks import adds_no_logs, selects_by_metric
from hvd_estimators.summary import as_keras_history
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.row_weights import check_classes
from hvd_estimators.training.run_state import check_state
from hvd_estimators.training.spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class _KerasTrial(Trial):
    """Results of a dry run, and the model copy that the dry run used.

    Attributes
    ----------
    dry_run : DryRun
        Holds the built and compiled model, and the conversion of columns to tensors.
    settings : CompileSettings
        The model's compile arguments.
    """

    dry_run: DryRun
    settings: CompileSettings


if TYPE_CHECKING:
    from hvd_estimators.keras.signatures import KerasEstimatorSignatures
else:
    KerasEstimatorSignatures = KerasParams


class KerasEstimator(KerasEstimatorSignatures):
    """Estimator that trains a Keras 3 model on a DataFrame with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns to the store as Parquet, trains with ``Model.fit`` on
    ``num_proc`` Spark tasks, and returns a `KerasModel`. The estimator does not change the given
    model and optimizer. The estimator runs on the driver; Keras must run on TensorFlow or
    torch.

    Each feature column is one input of the model, reshaped to the input's declared shape. A column
    of numbers becomes ``(rows, 1)``. Columns and inputs pair by name if each input has the name of
    a feature column, and by position otherwise.

    Each label column is compared to one output. Labels and outputs pair by name if the model
    returns a dict, or if its output layers are named after the labels. Otherwise labels and outputs
    pair by position. Outputs in a dict that are not labels are ignored.

    An epoch trains on every row once. Set the learning rate that you would use in a single process.
    Training multiplies the rate by the number of ranks, also if a callback or schedule sets it.
    Each step uses the gradient of the loss over the global batch.

    Callbacks run on every rank and see the metrics over all ranks. Callbacks that write files
    (TensorBoard, ModelCheckpoint, CSVLogger) run on rank 0, and so do your own callbacks with an
    attribute ``rank_zero_only = True``. Relative paths of a ModelCheckpoint or CSVLogger are below
    the run's logs. If a callback sets ``stop_training``, training ends after that epoch.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError, DependencyError
        Before training, if params, columns, shapes, rows, store, cluster or Keras are unsuitable.
    WorkerFailedError
        If a rank fails.
    """

    _framework = "keras"

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs; -1 stands for a variable size."""
        model = self.getOrDefault("model")
        return tuple(  # type: ignore[return-value]
            [[-1 if size is None else size for size in tensor.shape] for tensor in side]
            for side in (model.inputs, model.outputs)
        )

    def _try_frame(self, dataset: DataFrame) -> Trial | None:
        # Runs the checks that need no rows.
        self._new_dry_run()
        return super()._try_frame(dataset)

    def _dry_run(self, columns: Columns) -> Trial:
        return self._tried(DryRun.run, columns)

    def _without_dry_run(self, manifest: DatasetManifest) -> Trial:
        return self._tried(DryRun.look_at, self._first_rows(manifest))

    def _tried(self, use: Callable[[DryRun, Columns], None], columns: Columns) -> Trial:
        """Return the results of a new dry run that has used some rows."""
        dry_run, settings = self._new_dry_run()
        use(dry_run, columns)
        checkpoint, callbacks = (self.getOrDefault(n) for n in ("checkpoint_callback", "callbacks"))
        if checkpoint is not None and all(map(adds_no_logs, callbacks)):
            # Without validation, the hook _monitors() has led to a check of its name.
            is_validated = self.getOrDefault("validation") is not None
            has_validation = is_validated or checkpoint.monitor.startswith("val_")
            dry_run.check_selection(checkpoint, has_validation)
        passes = self.getOrDefault("backward_passes_per_step")
        if passes > 1 and dry_run.why_one_batch_per_step is not None:
            raise ParamError(
                "backward_passes_per_step: expected 1 for a model whose train_step "
                f"{dry_run.why_one_batch_per_step}, found {passes}."
            )
        dry_run.check_monitors("callbacks", callbacks)
        dry_run.check_monitors("checkpoint_callback", [checkpoint] if checkpoint else [])
        trial = _KerasTrial(
            dry_run.output_shapes,
            dry_run.takes_one_row,
            id_limits(dry_run.model, keras.tree.flatten(dry_run.tensors.inputs)),
            dry_run=dry_run,
            settings=settings,
        )
        self._check_validation(trial, self.getOrDefault("validation") is not None)
        return trial

    def _check_validation(self, trial: _KerasTrial, has_validation: bool) -> None:
        if has_validation and not trial.dry_run.has_test_loss:
            raise ParamError(
                f"validation: the model has its own train_step(), but {NO_TEST_LOSS} Or leave "
                "validation out."
            )

    def _check_trial(self, trial: Any, manifest: DatasetManifest) -> None:
        super()._check_trial(trial, manifest)
        self._check_validation(trial, manifest.validation is not None)
        if self.getOrDefault("class_weight"):
            (label,) = trial.dry_run.tensors.label_fields()
            check_classes(label.column, label.array(self._first_rows(manifest)[label.column]))

    def _tensor_dtype(self, name: str, stored: str, trial: Any) -> str:
        if name == self.getOrDefault("sample_weight_col"):
            return str(keras.config.floatx())
        tensors = trial.dry_run.tensors
        fields = [*keras.tree.flatten(tensors.inputs), *tensors.label_fields()]
        dtypes = (f.dtype_of(np.dtype(stored)) for f in fields if f.column == name)
        return str(next(dtypes, stored))

    def _dtype_remedy(self, name: str, dtype: str) -> str:
        if name == self.getOrDefault("sample_weight_col"):
            return "Divide the weights by a constant, or cast them to float or double."
        if name in self._input_columns().names:
            return f"Give the model's input for {name!r} that type: keras.Input(..., {dtype=})."
        return f"Call keras.config.set_floatx({dtype!r}) before the model is built."

    def _class_limits(self, trial: Any) -> Mapping[str, tuple[int, float | None]]:
        model, outputs = trial.dry_run.model, trial.dry_run.outputs
        if outputs is None or has_own_step(model) or trial.output_shapes is None:
            return {}
        losses = dict(zip(outputs.labels, losses_by_output(model.loss, outputs), strict=True))
        names = [outputs.labels[position] for position in outputs.selected]
        limits = {
            name: class_limit(losses[name], shape)
            for name, shape in zip(names, trial.output_shapes, strict=True)
            if name is not None
        }
        return {name: limit for name, limit in limits.items() if limit is not None}

    def _monitors(self) -> list[tuple[str, str | None]]:
        callback = self.getOrDefault("checkpoint_callback")
        selecting = [callback] if callback is not None and selects_by_metric(callback) else []
        what = "checkpoint_callback: its monitor"
        return [*super()._monitors(), *((what, each.monitor) for each in selecting)]

    def _learning_rates(self, trial: Any) -> list[float]:
        return learning_rates(trial.dry_run.model)

    def _has_own_tensorboard(self) -> bool:
        callbacks = self.getOrDefault("callbacks")
        return any(isinstance(each, keras.callbacks.TensorBoard) for each in callbacks)

    def _model_identity(self, trial: Any) -> dict[str, Any]:
        other_rate = self.getOrDefault("learning_rate") is not None
        identity = model_fingerprint(trial.dry_run.model, other_rate)
        # The backends have other random streams, and other states of generators.
        backend = keras.backend.backend()
        return {**identity, "loss": named(trial.settings.loss), "backend": backend}

    def _check_checkpoint(self, path: str, trial: Any) -> None:
        check_state(self._get_store(), path)

    def _check_spec(self, common: TrainSpec, trial: Any) -> None:
        check_batches(trial.dry_run.model, common.data)
        if common.data.passes_per_batch > 1:
            reason = trial.dry_run.why_one_batch_per_step
            if reason is not None:
                common.data.require_one_shard_per_rank("model", f"and its train_step {reason}")
        reductions_of(trial.dry_run.model, common.buffer_reduction)
        if common.data.train_plan.num_shards > 1:
            trial.dry_run.check_metrics()

    def _make_spec(self, common: TrainSpec, trial: Any) -> TrainSpec:
        get = self.getOrDefault
        return KerasTrainSpec(
            **vars(common),
            # Read after the dry run, which builds a model that was not built.
            model=ModelPayload(trial.dry_run.model, get("custom_objects")),
            tensors=trial.dry_run.tensors,
            weight_by_samples=self._weights_by_samples(trial.settings),
            checkpoint_callback=get("checkpoint_callback"),
            floatx=keras.config.floatx(),
            dtype_policy=keras.dtype_policies.serialize(keras.config.dtype_policy()),
            collectives=self._chosen_collectives(),
            prefetch=get("tensorflow_dataset_prefetch_buffer_size"),
            squeezed_shapes=trial.dry_run.squeezed_shapes,
        )

    def _rank_function(self) -> Trainer:
        return train

    def _rank_environment(self) -> Mapping[str, str | None]:
        return {"KERAS_BACKEND": keras.backend.backend(), **self.getOrDefault("backend_env")}

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> KerasModel:
        spec: KerasTrainSpec = run_results.spec
        state = run_results.state
        with kept_random_state():
            model = spec.model.load()
        load_values(model, state.path)
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
        fitted._set(_input_keys=input_keys(model, spec.tensors.inputs), _labels=spec.tensors.labels)
        return fitted

    def get_model_class(self) -> type[KerasModel]:
        """Return the class of the model that `fit` returns. Subclasses may override this method."""
        return KerasModel

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        floatx = fitted.pop("floatx")
        return {
            "custom_objects": self.getOrDefault("custom_objects"),
            "_floatx": floatx,
            **super()._get_model_kwargs(**fitted),
        }

    def _new_dry_run(self) -> tuple[DryRun, CompileSettings]:
        """Return a dry run of a new copy of the model, and the copy's compile arguments."""
        get = self.getOrDefault
        settings = self._compile_settings()

        def compile_model(model: keras.Model, outputs: Outputs | None) -> None:
            with kept_random_state():
                settings.apply(model, outputs)

        dry_run = DryRun(
            self._training_model(),
            self._input_columns().names,
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


def model_fingerprint(model: keras.Model, other_rate: bool) -> dict[str, Any]:
    """Return a model's layers, weight shapes and optimizers, without names that Keras numbers.

    Parameters
    ----------
    model : keras.Model
        The model, built and compiled.
    other_rate : bool
        Whether a param replaces the optimizer's learning rate.
    """
    left_out = ("name", "learning_rate") if other_rate else ("name",)
    return {
        "class": named(type(model)),
        "layers": {
            f"{number} ({named(type(layer))})": _plain_config(layer)
            for number, layer in enumerate(all_layers(model, include_self=False))
        },
        "weights": [[list(weight.shape), str(weight.dtype)] for weight in model.weights],
        "optimizers": {
            f"{number} ({named(type(optimizer))})": _plain_config(optimizer, left_out)
            for number, optimizer in enumerate(model_optimizers(model))
        },
    }


def _plain_config(given: Any, left_out: tuple[str, ...] = ("name",)) -> dict[str, Any]:
    """Return a config's plain values; an empty dict if there is no config."""
    try:
        config = given.get_config()
    except Exception:
        return {}
    plain = {}
    for key, value in config.items():
        if key == "learning_rate" and isinstance(value, dict) and key not in left_out:
            plain[key] = named(value.get("config"))
        elif key not in left_out and isinstance(value, (bool, int, float, str)):
            plain[key] = value
    return plain
