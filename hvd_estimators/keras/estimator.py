"""`KerasEstimator`, which trains a Keras model on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from hvd_estimators._util.random_state import kept_random_state
from hvd_estimators.estimator import HorovodEstimator
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.keras.framework import KerasFramework
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.model_file import load_values
from hvd_estimators.keras.serialization import dump
from hvd_estimators.keras.tensors import input_keys
from hvd_estimators.keras.trainer import KerasTrainSpec
from hvd_estimators.params import integer, narrowed, numbers, objects, param
from hvd_estimators.summary import as_keras_history

if TYPE_CHECKING:
    from hvd_estimators.keras.signatures import KerasEstimatorSignatures
else:
    KerasEstimatorSignatures = HorovodEstimator


def environment(name: str, value: Mapping[str, Any]) -> dict[str, str | None]:
    """Accept a dict of variable names to values."""
    if not isinstance(value, Mapping):
        raise ParamError(f"{name}: expected a dict of variable to value, found {value!r}.")
    return {str(key): None if entry is None else str(entry) for key, entry in value.items()}


def label_weights(
    name: str, value: float | Sequence[float] | Mapping[str, float]
) -> list[float] | dict[str, float]:
    """Accept weights as a list, or as a dict with names of labels or outputs as keys."""
    if isinstance(value, Mapping):
        return {str(key): numbers(name, weight)[0] for key, weight in value.items()}
    return numbers(name, value)


def _custom_objects(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ParamError(
            f"{name}: expected a dict of name to class or function, found {value!r}. Set "
            "{'MyLayer': MyLayer}."
        )
    return dict(value)


class KerasEstimator(KerasEstimatorSignatures):
    """Estimator that trains a Keras 3 model on a DataFrame, data-parallel, one process per rank.

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

    framework_class = KerasFramework

    model = narrowed(HorovodEstimator, "model", "keras.Model | Callable[..., keras.Model]")
    optimizer = param(
        "The optimizer, or its name. Its learning rate is for one rank. Default: the optimizer "
        "of the compiled model."
    )
    loss = param(
        "A loss for all labels, a list with one per label, or a dict by the names of labels or "
        "outputs. Default: the loss of the compiled model; none if the model calls add_loss()."
    )
    loss_weights = param(
        "Weights of the labels' losses, as a list, or as a dict with the keys of loss. Default: 1.",
        convert=label_weights,
    )
    metrics = param(
        "A list of Keras metrics. For several labels: a list with a metric or a list per label, "
        "or a dict with the keys of loss. Default: the metrics of the compiled model, if loss "
        "is not set.",
        default=[],
    )
    callbacks = param("Keras callbacks.", default=[], convert=objects)
    custom_objects = param(
        "Dict of name to custom class or function of the model. Classes of its layers are found "
        "without it.",
        default={},
        convert=_custom_objects,
    )
    checkpoint_callback = param(
        "A keras.callbacks.ModelCheckpoint that selects the returned model, such as "
        "BestModelCheckpoint(monitor='val_loss'). Its path is replaced. Default: the model "
        "after the last epoch.",
        type="keras.callbacks.ModelCheckpoint",
    )
    backend_env = param(
        "Environment variables of the ranks; None deletes a variable.",
        default={},
        convert=environment,
    )
    tensorflow_dataset_prefetch_buffer_size = param(
        "Number of prefetched batches, in addition to some MiB of rows that are not batched yet.",
        default=0,
        convert=integer(0),
    )

    def _dump_param(self, name: str, value: Any) -> bytes:
        return dump(value, self.getOrDefault("custom_objects"))

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of the model's inputs and outputs; -1 stands for a variable size."""
        model = self.getOrDefault("model")
        return tuple(  # type: ignore[return-value]
            [[-1 if size is None else size for size in tensor.shape] for tensor in side]
            for side in (model.inputs, model.outputs)
        )

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
        fitted._set(_keras_config=spec.config)
        if spec.collated is not None:
            fitted._set(_batch_names=list(spec.collated.names.features))
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
