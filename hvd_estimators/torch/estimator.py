"""`TorchEstimator`: trains a torch module on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_estimators.data.arrays import Columns
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial, repeated
from hvd_estimators.history import as_records
from hvd_estimators.torch.dry_run import check_batches, check_fit, check_own_step, takes_one_row
from hvd_estimators.torch.fingerprint import model_fingerprint
from hvd_estimators.torch.model import TorchModel
from hvd_estimators.torch.params import TorchParams
from hvd_estimators.torch.serialization import (
    load_module,
    load_optimizer,
    load_trained,
    module_file,
    restore_optimizer,
)
from hvd_estimators.torch.trainer import TorchTrainSpec, train
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.run_state import check_state
from hvd_estimators.training.spec import TrainSpec

__all__ = ["TorchEstimator"]


class TorchEstimator(TorchParams):
    """Trains a torch module on a DataFrame, with Horovod, one process per rank.

    ``fit(df)`` writes the needed columns as Parquet to the store, trains on ``num_proc`` Spark
    tasks, and returns a `TorchModel`. The model is called with one tensor per feature column,
    rows first (a number per row gives shape ``(rows,)``; ``input_form`` gives them by name), and
    returns a tensor, or one per label: in a list or tuple by position, in a dict or dataclass by
    the labels' names. A label is compared in its output's shape where the elements are as many. The
    given module and optimizer are left as they are; a module of ``torch.compile`` is compiled anew
    on the ranks, and `TorchModel.transform` runs it as it is. Runs on the driver.

    An epoch trains on every row once. The learning rate is that of one rank: it is multiplied by
    the number of ranks for training and divided again in what is returned. The gradient of a step
    is that of the mean loss over the rows of all ranks; with ``sample_weight_col`` that is
    ``sum(weight * loss) / rows``, in training and in validation. Metrics are not weighted.

    Raises
    ------
    ParamError, ColumnError, ShapeError, DataError, StoreError, SlotsError
        Before training, if params, columns, shapes, rows, store or cluster will not do.
    WorkerFailedError
        If a rank fails.
    """

    _framework = "torch"

    def _dry_run(self, columns: Columns) -> Trial:
        get = self.getOrDefault
        shapes = None
        if get("train_minibatch_fn") is not None:
            shapes = check_own_step(
                get("model"),
                get("optimizer"),
                self._objective(),
                columns,
                get("backward_passes_per_step"),
            )
            if get("validation") is None:
                return Trial(shapes or None)
        tensors = self._tensor_spec()
        tried = check_fit(get("model"), self._loss(), tensors, columns)
        one = tensors.inputs(repeated(columns, 1))
        one_row = takes_one_row(get("model"), lambda module: tensors.call(module, one))
        return Trial(tried or shapes or None, one_row)

    def _metric_names(self) -> list[str] | None:
        names = self._named_metrics().names
        return None if names is None else ["loss", *names]

    def _model_identity(self, trial: Trial) -> dict[str, Any]:
        get = self.getOrDefault
        return model_fingerprint(get("model"), get("optimizer"), get("learning_rate") is not None)

    def _check_checkpoint(self, path: str, trial: Trial) -> None:
        check_state(self.getOrDefault("store"), path)

    def _check_spec(self, common: TrainSpec, trial: Trial) -> None:
        get = self.getOrDefault
        own_step = get("train_minibatch_fn") is not None
        all_rows = get("train_steps_per_epoch") is None
        check_batches(get("model"), common.data, own_step, all_rows, trial.takes_one_row)

    def _make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        get = self.getOrDefault
        return TorchTrainSpec(
            **{**vars(common), "callbacks": ()},
            module=module_file(get("model")),
            optimizer=self._dump_optimizer(),
            objects=self._dump_objects(),
        )

    def _rank_function(self) -> Trainer:
        return train

    def _create_model(
        self, run_results: RunResults, run_id: str, metadata: Mapping[str, Any]
    ) -> TorchModel:
        spec = run_results.spec
        module, state = load_trained(run_results.state, lambda: load_module(spec.module))
        optimizer = load_optimizer(spec.optimizer, module)
        restore_optimizer(optimizer, module, state)
        return self.get_model_class()(
            **self._get_model_kwargs(
                model=module.eval(),
                history=as_records(run_results.history),
                optimizer=optimizer,
                run_id=run_id,
                metadata=metadata,
            )
        )

    def get_model_class(self) -> type[TorchModel]:
        """Return the class of the model that `fit` returns; for subclasses to override."""
        return TorchModel

    def _get_model_kwargs(self, **fitted: Any) -> dict[str, Any]:
        get = self.getOrDefault
        return {
            "input_shapes": get("input_shapes"),
            "column_dtypes": get("column_dtypes"),
            "input_form": get("input_form"),
            "loss_form": get("loss_form"),
            "loss": get("loss"),
            "loss_constructors": get("loss_constructors"),
            **super()._get_model_kwargs(**fitted),
        }
