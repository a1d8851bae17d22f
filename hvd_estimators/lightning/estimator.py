"""`LightningEstimator`: trains a LightningModule on a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from hvd_estimators.data.arrays import Columns
from hvd_estimators.exceptions import ShapeError
from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.fitting.run import RunResults
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.lightning.dry_run import (
    LightningTrial,
    check_loss,
    check_shards_of_module,
    check_step,
    compare_halves,
    row_shapes,
    unpacking_hint,
)
from hvd_estimators.lightning.loaders import BatchForm, is_lightning_data
from hvd_estimators.lightning.model import LightningModel
from hvd_estimators.lightning.package import is_lightning
from hvd_estimators.lightning.params import LightningParams, epochs_of_run
from hvd_estimators.lightning.predictor import forward_inputs
from hvd_estimators.lightning.trainer import train
from hvd_estimators.lightning.trainer_args import (
    LightningTrainSpec,
    TrainerObjects,
    as_list,
)
from hvd_estimators.summary import as_records
from hvd_estimators.torch.dry_run import check_embeddings, check_one_row
from hvd_estimators.torch.serialization import (
    dump_module,
    load_module,
    load_trained,
    module_file,
)
from hvd_estimators.training.call_transfer import Trainer
from hvd_estimators.training.spec import TrainSpec

_OF_A_PART = frozenset(
    {
        *("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "callbacks", "logger"),
        *("profiler", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar"),
        *("enable_model_summary", "default_root_dir", "num_sanity_val_steps"),
    }
)
"""Trainer arguments that may differ when a run is resumed."""

_MIXED_PRECISIONS: dict[Any, str] = {
    **dict.fromkeys(("bf16-mixed", "bf16"), "bf16"),
    **dict.fromkeys(("16-mixed", "16", 16), "fp16"),
}
"""Trainer's precisions that compute with autocast, to values of the param ``precision``."""

_ACCUMULATION_CALLBACK = "callbacks.GradientAccumulationScheduler"

_USERS_DATA_PARAMS = (
    *("transformation_edit_fields", "transformation_removed_fields", "debug_data_loader"),
    *("train_async_data_loader_queue_size", "val_async_data_loader_queue_size"),
)
"""Params that a LightningDataModule gets as keyword arguments of the same names."""


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

    _framework = "lightning"
    _ranks_log = True

    def _can_dry_run(self) -> bool:
        # The user's data module determines the form of batches.
        return super()._can_dry_run() and not is_lightning_data(self.getOrDefault("data_module"))

    def _dry_run(self, columns: Columns) -> Trial:
        get = self.getOrDefault
        module = get("model")
        batch = {name: torch.from_numpy(array.copy()) for name, array in columns.items()}
        try:
            batch = dict(BatchForm(get("column_dtypes"), self._column_shapes()).apply(batch))
        except RuntimeError as error:
            raise ShapeError(
                f"input_shapes, label_shapes: the columns cannot be reshaped to "
                f"{self._column_shapes()} ({error}). Set shapes of as many elements as the columns "
                "have."
            ) from error
        features = list(self._input_columns().names)
        one_row = check_step(module, batch, features, get("label_cols"), get("trainer_args"))
        halves = compare_halves(module, batch, get("trainer_args") or {})
        shapes = None
        if set(features) <= set(columns):  # otherwise a transformation has replaced these columns
            arrays = [columns[name] for name in features]
            spec = self._tensor_spec()
            shapes = row_shapes(module, forward_inputs(module, arrays, spec), spec) or None
        return LightningTrial(shapes, one_row, loss_of_halves=halves)

    def _tensor_dtype(self, name: str, stored: str, trial: Trial) -> str:
        dtype: str = self.getOrDefault("column_dtypes").get(name, stored)
        return dtype

    def _metric_names(self) -> list[str] | None:
        return None  # modules and callbacks can log any name

    def _validates_itself(self) -> bool:
        return is_lightning_data(self.getOrDefault("data_module"))

    def _model_identity(self, trial: Trial) -> dict[str, Any]:
        identity = super()._model_identity(trial)
        module, get = self.getOrDefault("model"), self.getOrDefault
        arguments = {k: v for k, v in (get("trainer_args") or {}).items() if k not in _OF_A_PART}
        identity["trainer_args"] = named(arguments)
        identity["hparams"] = named(dict(module.hparams))
        if get("learning_rate") is None:
            # Lightning's tuner sets these attributes.
            rates = {name: getattr(module, name, None) for name in ("learning_rate", "lr")}
            identity["rates"] = named(rates)
        return identity

    def _check_spec(self, common: TrainSpec, trial: Trial) -> None:
        get = self.getOrDefault
        if isinstance(trial, LightningTrial) and common.data.num_shards > 1:
            check_loss(trial.loss_of_halves)
        check_embeddings(get("model"), common.data)
        if trial.takes_one_row is False and get("train_steps_per_epoch") is None:
            check_one_row(get("model"), common.data, trial.takes_one_row)
        check_shards_of_module(get("model"), common.data, get("trainer_args") or {})
        if not is_lightning_data(get("data_module")):
            common.data.require_rows_in_batches("model: a LightningModule")
            common.data.require_validation_rows()

    def _make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        get = self.getOrDefault
        flavor = self._flavor()
        trainer_args = dict(get("trainer_args") or {})
        by_lightning = trainer_args.get("accumulate_grad_batches", 1) > 1
        common = replace(
            common,
            callbacks=(),
            use_gpu=common.use_gpu and get("num_gpus") != 0,
            epochs=epochs_of_run(trainer_args, common.epochs, common.data.train_steps_per_epoch),
            backward_passes_per_step=trainer_args.pop(
                "accumulate_grad_batches", common.backward_passes_per_step
            ),
        )
        objects = TrainerObjects(
            callbacks=(*get("callbacks"), *as_list(trainer_args.pop("callbacks", None))),
            logger=trainer_args.pop("logger", get("logger")),
            profiler=trainer_args.pop("profiler", get("profiler")),
            arguments=trainer_args,
        )
        schedules = (is_lightning(c, _ACCUMULATION_CALLBACK) for c in objects.callbacks)
        return LightningTrainSpec(
            **vars(common),
            weighs_by_batch=by_lightning or any(schedules),
            flavor=flavor,
            module=module_file(self._lightning_module()),
            collectives=self._chosen_collectives(),
            objects=cloudpickle.dumps(objects),
            form=BatchForm(get("column_dtypes"), self._column_shapes()),
            batch_hint=unpacking_hint(self._input_columns().names, get("label_cols")),
            log_every_n_steps=get("log_every_n_steps"),
            users_data={
                "num_reader_epochs": get("loader_num_epochs"),
                **{name: get(name) for name in _USERS_DATA_PARAMS},
            },
        )

    def _rank_function(self) -> Trainer:
        return train

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
