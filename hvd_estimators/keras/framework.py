"""Interface between a fit and Keras. Runs on the driver."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from hvd_estimators._util.random_state import kept_random_state
from hvd_estimators.data.arrays import Columns, take
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.checks import check_collectives
from hvd_estimators.fitting.fingerprint import named, with_options
from hvd_estimators.fitting.framework import WEIGHT_REMEDY, Fittable, Framework, is_function
from hvd_estimators.fitting.planning import rows_of_model
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.keras.backend import (
    all_layers,
    config,
    has_own_step,
    is_keras,
    learning_rates,
    model_optimizers,
    require_backend,
)
from hvd_estimators.keras.checks import check_model, check_params
from hvd_estimators.keras.collated import CollatedColumns
from hvd_estimators.keras.compile_args import CompileSettings, sums
from hvd_estimators.keras.custom_objects import remember
from hvd_estimators.keras.denominators import states_denominator
from hvd_estimators.keras.dry_run import DryRun, check_batches
from hvd_estimators.keras.losses import class_limit, losses_by_output
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.serialization import ModelPayload
from hvd_estimators.keras.settings import KerasSettings
from hvd_estimators.keras.trainer import KerasTrainSpec, train
from hvd_estimators.loading.collate_fn import BatchNames
from hvd_estimators.training.row_weights import check_classes
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _KerasTrial(Trial):
    """Results of a dry run, and the model copy that the dry run used.

    Attributes
    ----------
    dry_run : DryRun
        Holds the built and compiled model, and the conversion of columns to tensors.
    compiled : CompileSettings
        The model's compile arguments.
    collated : CollatedColumns or None
        Makes the columns of batches from a collate function or padding.
    """

    dry_run: DryRun
    compiled: CompileSettings
    collated: CollatedColumns | None = None


class KerasFramework(Framework):
    """The part of a fit that `KerasEstimator` has by itself."""

    settings_class = KerasSettings
    name = "keras"
    train = staticmethod(train)
    model_class = keras.Model
    tensor_library = str(keras.backend.backend())
    run_settings = (*Framework.run_settings, "class_weight")
    sent = (*Framework.sent, "checkpoint_callback")
    # Keras objects are serialized separately.
    sent_functions = ("loss", "metrics")
    settings: KerasSettings

    @classmethod
    def with_objects(cls, estimator: Fittable) -> Fittable:
        model, arguments = map(estimator.getOrDefault, ("model", "model_args"))
        made = super().with_objects(estimator)
        if is_function(model):
            remember(made.getOrDefault("model"), functools.partial(model, **arguments))
        return made

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        # Made by `check`, so that a model that Keras cannot copy fails early.
        self._prepared: tuple[DryRun, CompileSettings] | None = None

    def check(self) -> None:
        require_backend()
        check_collectives(self)
        check_model(self.settings)
        check_params(self.settings)
        super().check()
        if self.settings.collate is None:
            self._prepared = self._new_dry_run()
        else:  # only a batch shows the model's inputs
            self.settings.training_model()

    def dry_run(self, columns: Columns) -> Trial:
        return self._tried(DryRun.run, columns)

    def without_dry_run(self, first_rows: Callable[[], Columns]) -> Trial:
        return self._tried(DryRun.look_at, first_rows())

    def _tried(self, use: Callable[[DryRun, Columns], None], columns: Columns) -> Trial:
        """Return the results of a new dry run that has used some rows."""
        collated, given = None, columns
        if self.settings.collate is not None:
            batch = self.settings.delivered(columns)
            collated = CollatedColumns.of(batch, self._batch_names())
            given = collated.columns(batch)
        dry_run, compiled = self._prepared or self._new_dry_run(collated)
        self._prepared = None
        use(dry_run, given)
        if collated is not None and dry_run.output_shapes is not None:
            ends = (take(columns, rows) for rows in (slice(1), slice(-1, None)))
            dry_run.note_other_sizes(collated.columns(self.settings.delivered(e)) for e in ends)
        trial = _KerasTrial(
            dry_run.output_shapes,
            dry_run=dry_run,
            compiled=compiled,
            collated=collated,
            class_limits=_class_limits(dry_run),
            metric_names=self._metric_names(dry_run),
        )
        self._check_validation(trial, self.settings.validation is not None)
        return trial

    def _metric_names(self, dry_run: DryRun) -> list[str] | None:
        """Return the names in Keras's logs, unless the user's callbacks may add others."""
        are_kerass = all(is_keras(type(callback)) for callback in self.settings.callbacks)
        return dry_run.metric_names if are_kerass else None

    def _batch_names(self) -> BatchNames:
        settings = self.settings
        weight = settings.sample_weight_col
        return BatchNames(settings.inputs.names, tuple(settings.label_cols), weight)

    def _new_dry_run(
        self, collated: CollatedColumns | None = None
    ) -> tuple[DryRun, CompileSettings]:
        """Return a dry run of a new copy of the model, and the copy's compile arguments."""
        settings = self.settings
        compiled = settings.compile_settings()

        def compile_model(model: keras.Model, outputs: Outputs | None) -> None:
            with kept_random_state():
                compiled.apply(model, outputs)

        dry_run = DryRun(
            settings.training_model(),
            settings.inputs.names if collated is None else collated.names.features,
            settings.label_cols,
            settings.sample_weight_col,
            settings.label_shapes,
            compile_model,
            settings.class_weight,
            settings.training_model,
            compares=compiled.compares,
            selection=settings.outputs,
            original=settings.model,
            is_collated=collated is not None,
        )
        return dry_run, compiled

    def _check_validation(self, trial: _KerasTrial, has_validation: bool) -> None:
        error = trial.dry_run.test_error
        if has_validation and error is not None:
            raise ParamError(
                f"validation: test_step() fails with {type(error).__name__}: {error} Give the "
                "model a test_step(), or set loss. Or leave validation out."
            ) from error

    def check_trial(self, trial: Any, manifest: DatasetManifest) -> None:
        self._check_validation(trial, manifest.validation is not None)
        if self.settings.class_weight and trial.collated is None:
            (label,) = trial.dry_run.tensors.label_fields()
            check_classes(
                label.column, label.array(rows_of_model(self.settings, manifest)[label.column])
            )

    def tensor_dtype(self, name: str, stored: str, trial: Any) -> tuple[str, Callable[[str], str]]:
        if name == self.settings.sample_weight_col:
            return str(keras.config.floatx()), lambda dtype: WEIGHT_REMEDY

        def remedy(dtype: str) -> str:
            if name in self.settings.inputs.names:
                return f"Give the model's input for {name!r} that type: keras.Input(..., {dtype=})."
            return f"Call keras.config.set_floatx({dtype!r}) before the model is built."

        tensors = trial.dry_run.tensors
        fields = [*keras.tree.flatten(tensors.inputs), *tensors.label_fields()]
        dtypes = (f.dtype_of(np.dtype(stored)) for f in fields if f.column == name)
        return str(next(dtypes, stored)), remedy

    def learning_rates(self, trial: Any) -> list[float]:
        return learning_rates(trial.dry_run.model)

    def model_identity(self, trial: Any) -> dict[str, Any]:
        other_rate = self.settings.learning_rate is not None
        identity = model_fingerprint(trial.dry_run.model, other_rate)
        # The backends have other random streams, and other states of generators.
        backend = keras.backend.backend()
        return {**identity, "loss": with_options(trial.compiled.loss), "backend": backend}

    def make_spec(self, common: TrainSpec, trial: Any) -> TrainSpec:
        settings = self.settings
        check_batches(trial.dry_run.model, common.data)
        own_step = has_own_step(trial.dry_run.model)
        if not (own_step or all(map(states_denominator, sums(trial.compiled.loss)))):
            common.data.require_one_shard_per_rank("loss", "and reduction='sum' needs one batch")
        joint = trial.dry_run.joint_steps
        if joint is not None:
            common.data.require_one_shard_per_rank("model, loss", joint)
            if common.backward_passes_per_step > 1:
                raise ParamError(
                    "backward_passes_per_step: a step has several batches of a rank, found "
                    f"{common.backward_passes_per_step}, {joint}. Set backward_passes_per_step=1."
                )
        if common.data.train_plan.num_shards > 1:
            trial.dry_run.check_metrics()
            padded = [name for name in settings.label_cols if name in (settings.padding or ())]
            if padded and trial.dry_run.counts_rows:
                logger.warning(
                    "padding: the label %r is padded, and its loss may count the padding, whose "
                    "length depends on num_proc. Let the model mask it, as "
                    "Embedding(mask_zero=True) does, or give the loss a method "
                    "denominator(y_true, y_pred).",
                    padded[0],
                )
        return KerasTrainSpec(
            **vars(common),
            # Read after the dry run, which builds a model that was not built.
            model=ModelPayload(trial.dry_run.model, settings.custom_objects),
            tensors=trial.dry_run.tensors,
            checkpoint_callback=settings.checkpoint_callback,
            config=config(),
            dtype_policy=keras.dtype_policies.serialize(keras.config.dtype_policy()),
            collectives=self.collectives,
            collated=trial.collated,
            prefetch=settings.tensorflow_dataset_prefetch_buffer_size,
        )


def _class_limits(dry_run: DryRun) -> dict[str, tuple[int, float | None]]:
    """Return the number of classes, and the ignored number, by label of class numbers."""
    model, outputs = dry_run.model, dry_run.outputs
    if outputs is None or has_own_step(model) or dry_run.output_shapes is None:
        return {}
    losses = dict(zip(outputs.labels, losses_by_output(model.loss, outputs), strict=True))
    names = [outputs.labels[position] for position in outputs.selected]
    limits = {
        name: class_limit(losses[name], shape)
        for name, shape in zip(names, dry_run.output_shapes, strict=True)
        if name is not None
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


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
        is_schedule = key == "learning_rate" and isinstance(value, dict)
        if key not in left_out and (is_schedule or isinstance(value, (bool, int, float, str))):
            plain[key] = with_options(value)
    return plain
