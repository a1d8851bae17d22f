"""`KerasEstimator`: trains a Keras model on a DataFrame."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from pyspark.sql import DataFrame

from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import DataError, ParamError
from hvd_estimators.keras.backend import (
    has_own_compile,
    model_optimizers,
    require_tensorflow,
)
from hvd_estimators.keras.checks import DryRun, kept_random_state
from hvd_estimators.keras.class_weights import check_classes
from hvd_estimators.keras.compiling import CompileSettings
from hvd_estimators.keras.converters import class_weights, environment, label_weights
from hvd_estimators.keras.identity import model_identity
from hvd_estimators.keras.inputs import input_keys, input_structure, text_columns
from hvd_estimators.keras.losses import (
    NO_LOSS,
    has_loss,
    has_own_step,
    may_add_loss,
    weights_by_samples,
)
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.outputs import Outputs
from hvd_estimators.keras.serialization import (
    OptimizerDocument,
    dump,
    dump_model,
    load,
    load_model,
    load_weights,
)
from hvd_estimators.keras.session import check_callbacks
from hvd_estimators.keras.trainer import KerasTrainSpec, train
from hvd_estimators.launch.backend import Backend
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.params import declare, integer
from hvd_estimators.parquet.columns import Columns
from hvd_estimators.parquet.manifest import DatasetManifest
from hvd_estimators.prepare.properties import column_metadata
from hvd_estimators.runs import named
from hvd_estimators.spec import EpochMetrics, TrainResult

__all__ = ["KerasEstimator"]

logger = logging.getLogger(__name__)


class KerasEstimator(HorovodEstimator):
    """Trains a Keras 3 model on a DataFrame, with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks with ``Model.fit``, and returns a `KerasModel`. Each feature column is one input of the
    model, reshaped to what the model declares (a number per row is ``(rows, 1)``), and each label
    column is compared to one output: to that of its name, where the model returns a dict or where
    the output layers are named after the labels, and by position otherwise. Outputs of a dict that
    are no labels are left alone. The given model and optimizer are left as they are. Runs on the
    driver; Keras has to run on TensorFlow.

    An epoch trains on every row once. The learning rate is that of one rank: training applies it
    multiplied by the number of ranks, and what callbacks and schedules set counts in the same way.
    The gradient of a step is that of the loss over the rows of all ranks. Callbacks run on every
    rank and see what was measured on all of them; those that write files (TensorBoard,
    ModelCheckpoint, CSVLogger, and your own with an attribute ``rank_zero_only = True``) run on
    rank 0. ``stop_training`` ends training after the epoch in which a callback sets it.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError, DependencyError
        Before training, if params, columns, shapes, rows, store, cluster or Keras will not do.
    WorkerFailedError
        If a rank fails.
    """

    _state_reader = "keras.saving.load_model(path), or load_weights(path), with a proper suffix"

    optimizer = declare(
        "The optimizer, or its name. Its learning rate is for one rank. Default: what the model is "
        "compiled with."
    )
    loss = declare(
        "A loss for all labels, a list with one per label, or a dict by the names of labels or "
        "outputs. Default: what the model is compiled with; none where it calls add_loss()."
    )
    loss_weights = declare(
        "Weights of the labels' losses, as a list or as a dict like that of loss. Default: 1.",
        convert=label_weights,
    )
    metrics = declare(
        "A list of Keras metrics; of several labels a list with one, or a list, per label, or a "
        "dict like that of loss. Default: what the model is compiled with, where loss is not set.",
        default=[],
    )
    callbacks = declare("Keras callbacks.", default=[])
    custom_objects = declare(
        "Name to custom class or function of the model, beside those that can be found in it.",
        default={},
    )
    checkpoint_callback = declare(
        "A keras.callbacks.ModelCheckpoint that decides which model is returned, such as "
        "BestModelCheckpoint(monitor='val_loss'). Its path is replaced. Default: the last one."
    )
    backend_env = declare(
        "Environment variables of the ranks; None deletes one.", default={}, convert=environment
    )
    class_weight = declare(
        "Class number to weight, for a single label of class numbers or one-hot rows: rows count "
        "in training for the weight of their class, times that of sample_weight_col. Classes that "
        "are not named count for 1.",
        convert=class_weights,
    )
    tensorflow_dataset_prefetch_buffer_size = declare(
        "Batches that are ready beforehand, besides some MiB that are to be cut into batches.",
        default=0,
        convert=integer(0),
    )

    _run_settings = (*HorovodEstimator._run_settings, "class_weight")

    def get_model_class(self) -> type[KerasModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""
        return KerasModel

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs, -1 for what is not fixed."""
        model = self.getOrDefault("model")
        return tuple(  # type: ignore[return-value]
            [[-1 if size is None else size for size in tensor.shape] for tensor in side]
            for side in (model.inputs, model.outputs)
        )

    def _check_params(self) -> None:
        get = self.getOrDefault
        if not get("label_cols"):
            raise ParamError(
                "label_cols is not set. Set label_cols. A model that is compared to no labels can "
                "be given any column for one, such as a feature column: a train_step of its own "
                "gets (x, y) and leaves y alone, and losses of add_loss() need no y."
            )
        require_tensorflow()
        # What else is checked asks the model.
        self._check_model()
        super()._check_params()
        model = get("model")
        if get("optimizer") is None and not model.compiled:
            raise ParamError("optimizer is not set. Set optimizer, or compile the model with one.")
        if has_own_compile(model):
            self._check_own_compile()
        else:
            self._optimizer()
        has_way = get("loss") is not None or has_loss(model) or has_own_step(model)
        if not has_way and not may_add_loss(model):
            raise ParamError(NO_LOSS)
        check_callbacks(get("callbacks"))
        checkpoint = get("checkpoint_callback")
        if checkpoint is not None and not isinstance(checkpoint, keras.callbacks.ModelCheckpoint):
            raise ParamError(
                "checkpoint_callback: expected a keras.callbacks.ModelCheckpoint, found "
                f"{checkpoint!r}."
            )
        if get("class_weight") and len(get("label_cols")) > 1:
            raise ParamError(
                f"class_weight: expected a single label, found {get('label_cols')}. Set "
                "sample_weight_col, or weights in the losses."
            )
        label_shapes = get("label_shapes")
        if label_shapes is not None and len(label_shapes) != len(get("label_cols")):
            raise ParamError(
                f"label_shapes: expected one shape per label, {len(get('label_cols'))}, found "
                f"{len(label_shapes)}."
            )

    def _check_model(self) -> None:
        model = self.getOrDefault("model")
        if model is None:
            raise ParamError("model is not set. Set model.")
        if type(model).__module__.startswith(("tf_keras", "tensorflow.python.keras")):
            raise ParamError(
                f"model: it is of Keras 2 ({type(model)}), and this estimator trains Keras 3. Make "
                "it of the package keras instead of tf_keras, and unset TF_USE_LEGACY_KERAS."
            )
        if not isinstance(model, keras.Model):
            raise ParamError(f"model: expected a keras.Model, found {type(model)}.")

    def _check_own_compile(self) -> None:
        """Make sure that a model that has its own ``compile`` can stay as it is compiled."""
        get = self.getOrDefault
        names = ("optimizer", "loss", "loss_weights", "metrics")
        given = [name for name in names if get(name) not in (None, [])]
        if given or not get("model").compiled:
            raise ParamError(
                f"model: its class {type(get('model')).__name__} has its own compile(), which only "
                "you can call. Compile the model and leave optimizer, loss, loss_weights and "
                f"metrics out; found {', '.join(given) or 'a model that is not compiled'}."
            )
        optimizers = model_optimizers(get("model"))
        if not optimizers:
            raise ParamError(
                "model: expected a Keras optimizer in the model or among its attributes, found "
                "none. Let its compile() keep its optimizers as attributes."
            )
        if len(optimizers) > 1 and get("backward_passes_per_step") > 1:
            raise ParamError(
                "backward_passes_per_step: expected 1 for a model with several optimizers, found "
                f"{get('backward_passes_per_step')}."
            )

    def _text_cols(self) -> Mapping[str, bool]:
        """Return the columns of inputs of text, and all where the model does not tell its inputs.

        Of these bytes stay arrays of numbers, as images are stored.
        """
        model = self.getOrDefault("model")
        return text_columns(input_structure(model, self.getOrDefault("feature_cols")))

    def _check_frame(self, dataset: DataFrame) -> Any:
        # What needs no rows.
        self._new_dry_run()
        return super()._check_frame(dataset)

    def _train(self, manifest: DatasetManifest, backend: Backend, trial: Any = None) -> KerasModel:
        get = self.getOrDefault
        data = self._data_spec(manifest, backend.num_processes())
        has_weights = bool(get("class_weight"))
        first = self._first_rows(manifest) if has_weights or trial is None else {}
        dry_run: DryRun = trial or self._dry_run(first)
        if has_weights:
            (label,) = dry_run.tensors.label_fields()
            check_classes(label.column, label.array(first[label.column]))
        self._check_steps(dry_run.model, data)
        if dry_run.output_shapes:
            self._class_scores(dry_run.output_shapes)
        if data.train_plan.num_shards > 1:
            dry_run.check_metrics()
        settings = self._compile_settings()
        identity = model_identity(dry_run.model, get("learning_rate") is not None)
        identity["loss"] = named(settings.loss)
        common = self._common_spec(data, "keras", self._fingerprint(manifest, identity))
        self._check_resume(dry_run.model, common["run"].checkpoint_path)
        spec = KerasTrainSpec(
            **common,
            # After the dry run, which builds a model that was not built.
            model=dump(dry_run.model, get("custom_objects")),
            tensors=dry_run.tensors,
            weight_by_samples=self._weights_by_samples(settings),
            checkpoint_callback=get("checkpoint_callback"),
            floatx=keras.config.floatx(),
            dtype_policy=keras.dtype_policies.serialize(keras.config.dtype_policy()),
            prefetch=get("tensorflow_dataset_prefetch_buffer_size"),
        )
        environment = {"KERAS_BACKEND": "tensorflow", **get("backend_env")}
        return self._run(
            backend,
            train,
            spec,
            lambda results: self._create_model(results, spec, dry_run.output_shapes),
            environment,
        )

    def _create_model(
        self,
        results: Sequence[TrainResult],
        spec: KerasTrainSpec,
        output_shapes: list[tuple[int, ...]] | None,
    ) -> KerasModel:
        """Make the model from what the ranks returned; for subclasses to override."""
        with kept_random_state():
            model = load(spec.model)
        load_weights(model, self._trained_state(results))
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=model,
                history=_as_history(results[0].history),
                run_id=spec.run.run_id,
                _input_keys=input_keys(model, spec.tensors.inputs),
                _metadata=column_metadata(spec.data.columns),
                output_shapes=None if output_shapes is None else list(map(list, output_shapes)),
            )
        )

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        """Return the model's params; for subclasses to override."""
        return {
            "feature_columns": self.getOrDefault("feature_cols"),
            "label_columns": self.getOrDefault("label_cols"),
            "custom_objects": self.getOrDefault("custom_objects"),
            "_floatx": keras.config.floatx(),
            **self._classification(),
            **self._transformation_params(),
            **fitted,
        }

    def _optimizer(self) -> keras.optimizers.Optimizer:
        given = self.getOrDefault("optimizer")
        if given is None:
            given = self.getOrDefault("model").optimizer
        try:
            return keras.optimizers.get(given)
        except (TypeError, ValueError) as error:
            raise ParamError(f"optimizer: expected a Keras optimizer, found {given!r}.") from error

    def _training_model(self) -> keras.Model:
        """Return a copy of the model, not compiled."""
        objects = self.getOrDefault("custom_objects")
        with kept_random_state():
            try:
                return load_model(dump_model(self.getOrDefault("model"), objects))
            except Exception as error:
                raise ParamError(
                    "model: it can neither be pickled, nor saved and loaded, as its copies for "
                    f"the ranks have to be ({type(error).__name__}: {error}). Give the classes "
                    "that it is made of a get_config(), or leave out of their attributes what "
                    "belongs to this process, such as open files, locks and datasets."
                ) from error

    def _compile_settings(self) -> CompileSettings:
        """Return what the model is compiled with for training."""
        get = self.getOrDefault
        given: keras.Model = get("model")
        compiled = dict(given._compile_config.config) if given.compiled else {}
        compiled.pop("optimizer", None)
        if compiled.get("jit_compile"):
            logger.warning(
                "jit_compile is turned off while the ranks train: Horovod's operations cannot be "
                "compiled by XLA. Compile the model with jit_compile=False to leave this out."
            )
        params = {name: get(name) for name in ("loss", "loss_weights") if get(name) is not None}
        if get("metrics"):
            params["metrics"] = get("metrics")
        if has_own_compile(given):
            settings = CompileSettings(None, compiled, {}, get("label_cols"))
            self._weights_by_samples(settings)
            return settings
        optimizer = OptimizerDocument.of(self._optimizer(), get("custom_objects"))
        try:
            made = optimizer.make()
        except (TypeError, ValueError) as error:
            raise ParamError(
                f"optimizer: its config makes no copy for the ranks ({type(error).__name__}: "
                f"{error}). Give a MultiOptimizer an OptimizerMap, not a function; set "
                "custom_objects to classes and functions that the config names."
            ) from error
        rate = get("learning_rate")
        if rate is not None:
            try:
                made.learning_rate = rate
            except (TypeError, AttributeError) as error:
                raise ParamError(
                    f"learning_rate: that of {type(made).__name__} cannot be set ({error}). Leave "
                    "learning_rate out, or give an optimizer with a number as its rate."
                ) from error
        settings = CompileSettings(optimizer, compiled, params, get("label_cols"), rate)
        self._weights_by_samples(settings)
        return settings

    def _weights_by_samples(self, settings: CompileSettings) -> bool:
        """Return what batches count for; see `KerasTrainSpec`."""
        found = weights_by_samples(settings.loss)
        if found is None:
            raise ParamError(
                "loss: expected losses that are means over the rows, all in the same way, so that "
                "the ranks' gradients can be averaged. Set reduction='sum_over_batch_size', or "
                "'mean_with_sample_weight', for all of them."
            )
        get = self.getOrDefault
        return found and bool(get("sample_weight_col") is not None or get("class_weight"))

    def _dry_run(self, columns: Columns) -> DryRun:
        dry_run = self._new_dry_run()
        if self.getOrDefault("dry_run"):
            dry_run.run(columns)
        else:
            dry_run.look_at(columns)
        return dry_run

    def _new_dry_run(self) -> DryRun:
        get = self.getOrDefault
        settings = self._compile_settings()

        def compile_model(model: keras.Model, outputs: Outputs | None) -> None:
            with kept_random_state():
                settings.apply(model, outputs)

        return DryRun(
            self._training_model(),
            get("feature_cols"),
            get("label_cols"),
            get("sample_weight_col"),
            get("label_shapes"),
            compile_model,
            get("class_weight"),
            self._training_model,
            compares=has_loss(get("model")) or settings.compares,
        )

    def _check_resume(self, model: keras.Model, path: str | None) -> None:
        """Refuse to go on where the state of all optimizers cannot be restored."""
        ready = all(optimizer.built for optimizer in model_optimizers(model))
        if not ready and path is not None and self.getOrDefault("store").exists(path):
            raise ParamError(
                f"run_id: {self.getOrDefault('run_id')!r} cannot be resumed, as optimizers among "
                "the model's attributes are not built and would lose their state. Set another "
                "run_id, or call build() of each optimizer with its variables before fit()."
            )

    def _check_steps(self, model: keras.Model, data: DataSpec) -> None:
        """Refuse batches that a model cannot take."""
        plan = data.train_plan
        sizes = [
            size
            for rank in range(plan.num_shards)
            for size in plan.batch_sizes(rank, data.batch_size)
        ]
        has_batch_norm = any(
            isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()
        )
        if has_batch_norm and 0 in sizes:
            raise DataError(
                "Batch normalization needs a row on every rank in every step, and there are "
                f"{sum(sizes)} rows for {plan.num_shards} ranks. Set num_proc or batch_size so "
                "that the rows can be shared out."
            )

    def _dump_param(self, name: str, value: Any) -> bytes:
        if name == "optimizer" and isinstance(value, keras.optimizers.Optimizer):
            value = OptimizerDocument.of(value, self.getOrDefault("custom_objects"))
        return dump(value, self.getOrDefault("custom_objects"))

    def _load_params(self, documents: dict[str, bytes]) -> dict[str, Any]:
        values = super()._load_params(documents)
        document = values.get("optimizer")
        if isinstance(document, OptimizerDocument):
            optimizer = values["optimizer"] = document.make()
            model = values.get("model", self.getOrDefault("model"))
            if model is not None and model.built:
                document.restore(optimizer, model.trainable_variables)
        return values


def _as_history(records: Sequence[EpochMetrics]) -> dict[str, list[Any]]:
    """Return epochs as Keras's ``History.history``."""
    history: dict[str, list[Any]] = {}
    for record in records:
        for name, value in record.train.items():
            history.setdefault(name, []).append(value)
        for name, value in (record.validation or {}).items():
            history.setdefault(f"val_{name}", []).append(value)
    return history
