"""`KerasEstimator`, which trains a Keras model on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras

from hvd_estimators.fitting.run import RunResults
from hvd_estimators.keras.backend import (
    kept_random_state,
)
from hvd_estimators.keras.framework import KerasFramework
from hvd_estimators.keras.model import KerasModel
from hvd_estimators.keras.model_file import load_values
from hvd_estimators.keras.params import KerasParams
from hvd_estimators.keras.tensors import input_keys
from hvd_estimators.keras.trainer import KerasTrainSpec
from hvd_estimators.summary import as_keras_history

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

    framework_class = KerasFramework

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
