"""`LightningEstimator`: trains a LightningModule on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvd_estimators.fitting.run import RunResults
from hvd_estimators.lightning.framework import LightningFramework
from hvd_estimators.lightning.model import LightningModel
from hvd_estimators.lightning.params import LightningParams
from hvd_estimators.summary import as_records
from hvd_estimators.torch.serialization import (
    dump_module,
    load_module,
    load_trained,
)

_MIXED_PRECISIONS: dict[Any, str] = {
    **dict.fromkeys(("bf16-mixed", "bf16"), "bf16"),
    **dict.fromkeys(("16-mixed", "16", 16), "fp16"),
}
"""Trainer's precisions that compute with autocast, to values of the param ``precision``."""

if TYPE_CHECKING:
    from hvd_estimators.lightning.signatures import LightningEstimatorSignatures
else:
    LightningEstimatorSignatures = LightningParams


class LightningEstimator(LightningEstimatorSignatures):
    """Spark ML estimator that trains a LightningModule with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks with Lightning's Trainer, and returns a `LightningModel`. Runs on the driver.

    ``training_step`` and ``validation_step`` get each batch as a dict of column name to tensor,
    rows first. Tensors have the dtypes of the stored columns, unless ``column_dtypes`` names
    others. A module that reads ``sample_weight_col`` should return ``(weight * loss).mean()``,
    which is the definition that the other estimators use.

    `TorchEstimator` trains a plain ``torch.nn.Module`` with an optimizer and a loss.

    An epoch trains on every row once. Optimizers step with their learning rates multiplied by the
    number of ranks. In automatic and in manual optimization, each step uses the gradient of the
    mean over the global batch. Each rank needs a row in each step and in validation.

    Values that are logged for an epoch are reduced over the ranks by rows, with or without
    ``sync_dist``. Therefore callbacks see the same values on every rank. With a ``ModelCheckpoint``
    that has a ``monitor``, `fit` returns the best weights instead of the last. Its files are
    written to the run's directory in the store.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster are not usable.
    WorkerFailedError
        If a rank fails.
    """

    framework_class = LightningFramework

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> LightningModel:
        given = self.getOrDefault("model")
        module, _ = load_trained(run_results.state, lambda: load_module(dump_module(given)))
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                history=as_records(run_results.history),
                optimizer=None,
                run_id=run_id,
                metadata=metadata,
            )
        )

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        precision = (self.getOrDefault("trainer_args") or {}).get("precision")
        chosen = _MIXED_PRECISIONS.get(precision, self.getOrDefault("precision"))
        return {**super()._get_model_kwargs(**fitted), "precision": chosen}

    def get_model_class(self) -> type[LightningModel]:
        """Return the class of the model that `fit` returns. Subclasses may override it."""
        return LightningModel


TorchEstimator = LightningEstimator
