"""`TorchEstimator`, which trains a torch module on a DataFrame."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hvd_estimators.fitting.run import RunResults
from hvd_estimators.summary import as_records
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.torch.model import TorchModel
from hvd_estimators.torch.params import TorchParams
from hvd_estimators.torch.serialization import (
    dump_optimizer,
    load_module,
    load_optimizer,
    load_trained,
    restore_optimizer,
)
from hvd_estimators.torch.shared_params import COLLATE_PARAMS
from hvd_estimators.torch.trainer import TrainedObjects

if TYPE_CHECKING:
    from hvd_estimators.torch.signatures import TorchEstimatorSignatures
else:
    TorchEstimatorSignatures = TorchParams


class TorchEstimator(TorchEstimatorSignatures):
    """Estimator that trains a torch module on a DataFrame with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns to the store as Parquet, trains on ``num_proc`` Spark
    tasks, and returns a `TorchModel`.

    The model is called with one tensor per feature column, rows first. A column with one number per
    row gives shape ``(rows,)``. ``input_form`` can pass the tensors by name. The model returns one
    tensor, or one tensor per label. A list or tuple pairs outputs with labels by position; a dict
    or dataclass pairs them by label name. A label is reshaped to its output's shape if both have
    the same number of elements.

    The given module and optimizer are not modified. The ranks compile a ``torch.compile`` module
    again, and `TorchModel.transform` runs the module uncompiled. Runs on the driver.

    An epoch trains on every row once. Set the learning rate that you would use in a single process:
    training multiplies it by the number of ranks, and the returned optimizer has the original rate.
    Each step uses the gradient of the mean loss over the global batch. With ``sample_weight_col``
    this loss is ``sum(weight * loss) / rows``, in training and in validation. Metrics are not
    weighted.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster are not usable.
    WorkerFailedError
        If a rank fails.
    """

    framework_class = TorchFramework

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> TorchModel:
        given: Callable[[], TrainedObjects] = functools.cache(
            lambda: load_module(run_results.spec.objects)
        )
        module, state = load_trained(run_results.state, lambda: given().module)
        if state["others"]:
            optimizer, returned = state["others"]
        else:
            document, returned = dump_optimizer(given().optimizer, given().module), given().returned
            optimizer = load_optimizer(document, module)
            restore_optimizer(optimizer, module, state)
        model = self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                history=as_records(run_results.history),
                optimizer=optimizer,
                run_id=run_id,
                metadata=metadata,
            )
        )
        model.setParams(**returned)
        return model

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the model that `fit` returns. Subclasses can override this method."""
        return TorchModel

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        names = (
            *("input_shapes", "column_dtypes", "input_form"),
            *("loss_form", "loss", "loss_constructors", "loss_weights", "metrics"),
            *("label_shapes", "precision", *COLLATE_PARAMS),
        )
        own = {name: self.getOrDefault(name) for name in names}
        own["_upstream_names"] = self.upstream_names
        return {**own, **super()._get_model_kwargs(**fitted)}
