"""`TorchEstimator`, which trains a torch module on a DataFrame."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from hvd_estimators.data.arrays import Columns
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial, repeated
from hvd_estimators.summary import as_records
from hvd_estimators.torch.callbacks import MONITOR, EarlyStopping
from hvd_estimators.torch.dry_run import (
    check_batches,
    check_embeddings,
    check_fit,
    check_optimizer_state,
    check_own_step,
    needs_two_rows,
    takes_one_row,
)
from hvd_estimators.torch.lookups import Lookups
from hvd_estimators.torch.model import TorchModel
from hvd_estimators.torch.optimizer_step import StepOptions, autocast, learning_rates
from hvd_estimators.torch.params import TorchParams
from hvd_estimators.torch.serialization import (
    dump_optimizer,
    load_module,
    load_optimizer,
    load_trained,
    module_file,
    plain_module,
    restore_optimizer,
)
from hvd_estimators.torch.trainer import TorchTrainSpec, TrainedObjects, train
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.row_weights import check_classes
from hvd_estimators.training.run_state import check_state
from hvd_estimators.training.spec import TrainSpec

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

    _framework = "torch"

    def _dry_run(self, columns: Columns) -> Trial:
        get = self.getOrDefault
        check_optimizer_state(get("model"), get("optimizer"))
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
        with autocast(get("precision"), "cpu"):
            tried = check_fit(
                *(get("model"), self._loss(), tensors, columns, self._named_metrics()),
                validates=get("validation") is not None,
                declares_state=get("stateful") is not None,
            )

        def call(rows: int) -> Callable[[Any], Any]:
            inputs = tensors.inputs(repeated(columns, rows))

            def run(module: torch.nn.Module) -> None:
                with Lookups(dict(zip(tensors.feature_cols, inputs, strict=True))) as lookups:
                    tensors.call(module, inputs)
                id_limits.update(lookups.id_limits)

            return run

        id_limits: dict[str, int] = {}
        one_row = takes_one_row(get("model"), call(1), [call(2), call(3)])
        return Trial(tried or shapes or None, one_row, id_limits)

    def _check_trial(self, trial: Trial, manifest: DatasetManifest) -> None:
        super()._check_trial(trial, manifest)
        if self.getOrDefault("class_weight") and self._transformation() is None:
            (label,) = self.getOrDefault("label_cols")
            check_classes(label, self._first_rows(manifest)[label])

    def _metric_names(self) -> list[str] | None:
        names = self._named_metrics().names
        return None if names is None else ["loss", *names]

    def _learning_rates(self, trial: Trial) -> list[float]:
        optimizer = self.getOrDefault("optimizer")
        own = learning_rates(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
        return super()._learning_rates(trial) or own

    def _monitors(self) -> list[tuple[str, str | None]]:
        stopping = [c for c in self.getOrDefault("callbacks") if isinstance(c, EarlyStopping)]
        return [*super()._monitors(), *((MONITOR, callback.monitor) for callback in stopping)]

    def _model_identity(self, trial: Trial) -> dict[str, Any]:
        get = self.getOrDefault
        return _model_fingerprint(get("model"), get("optimizer"), get("learning_rate") is not None)

    def _check_checkpoint(self, path: str, trial: Trial) -> None:
        check_state(self._get_store(), path)

    def _min_batch_rows(self, trial: Trial) -> int:
        return 2 if needs_two_rows(self.getOrDefault("model"), trial.takes_one_row) else 1

    def _check_spec(self, common: TrainSpec, trial: Trial) -> None:
        get = self.getOrDefault
        own_step = get("train_minibatch_fn") is not None
        all_rows = get("train_steps_per_epoch") is None
        check_embeddings(get("model"), common.data)
        check_batches(get("model"), common.data, own_step, all_rows, trial.takes_one_row)

    def _make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        get = self.getOrDefault
        return TorchTrainSpec(
            **{**vars(common), "callbacks": ()},
            collectives=self._chosen_collectives(),
            objects=module_file(self._trained_objects(), get("stateful") or ()),
        )

    def _trained_objects(self) -> TrainedObjects:
        get = self.getOrDefault
        return TrainedObjects(
            module=get("model"),
            optimizer=get("optimizer"),
            callbacks=tuple(get("callbacks")),
            stateful=tuple(get("stateful") or ()),
            objective=self._objective(),
            options=StepOptions(**{name: get(name) for name in self._step_params}),
            learning_rate=get("learning_rate"),
            returned={name: get(name) for name in ("loss", "loss_constructors", "metrics")},
        )

    def _rank_function(self) -> Trainer:
        return train

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
            *("label_shapes", "precision"),
        )
        own = {name: self.getOrDefault(name) for name in names}
        own["_upstream_names"] = self._upstream_names
        return {**own, **super()._get_model_kwargs(**fitted)}


def _model_fingerprint(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, other_rate: bool
) -> dict[str, Any]:
    """Return the fingerprint: layers, shapes of weights, and the optimizer's options.

    Parameters
    ----------
    module : torch.nn.Module
        The model. A compiled module has the fingerprint of the original module.
    optimizer : torch.optim.Optimizer or None
        None if the module creates the optimizer on the ranks.
    other_rate : bool
        Whether a param replaces the optimizer's learning rate.
    """
    module = plain_module(module)
    identity: dict[str, Any] = {
        "class": named(type(module)),
        # Remove memory addresses, which may appear for functions among a module's attributes.
        "layers": re.sub(r" at 0x[0-9a-f]+", "", repr(module)),
        "weights": [
            [name, None if is_lazy(value) else list(value.shape), str(value.dtype)]
            for name, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)
        ],
    }
    if optimizer is not None:
        # The param that replaces the optimizer's rate is one of the run settings.
        left_out = {"params", "initial_lr"} | ({"lr"} if other_rate else set())
        identity["optimizer"] = named(type(optimizer))
        identity["options"] = {
            f"group {number}": {
                key: named(_number(value)) for key, value in group.items() if key not in left_out
            }
            for number, group in enumerate(optimizer.param_groups)
        }
    return identity


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
