"""Interface between a fit and Lightning. Runs on the driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hvd_estimators.data.arrays import Columns, num_rows, take
from hvd_estimators.exceptions import ParamError, ShapeError
from hvd_estimators.fitting.fingerprint import named
from hvd_estimators.fitting.trial import Trial
from hvd_estimators.lightning.checkpoint import check_links
from hvd_estimators.lightning.checks import check_training
from hvd_estimators.lightning.dry_run import (
    LightningTrial,
    check_loss,
    check_shards_of_module,
    row_shapes,
    try_step,
)
from hvd_estimators.lightning.loaders import BatchForm, check_validation_batches
from hvd_estimators.lightning.predictor import collated_inputs, forward_inputs
from hvd_estimators.lightning.settings import LightningSettings
from hvd_estimators.lightning.trainer import train
from hvd_estimators.lightning.trainer_args import LightningTrainSpec, TrainerObjects, as_list
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.torch.dry_run import check_one_row, with_any_size
from hvd_estimators.torch.framework import TorchFramework
from hvd_estimators.torch.serialization import module_file
from hvd_estimators.training.spec import TrainSpec

_OF_A_PART = frozenset(
    {
        *("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "callbacks", "logger"),
        *("profiler", "log_every_n_steps", "enable_checkpointing", "enable_progress_bar"),
        *("enable_model_summary", "default_root_dir", "num_sanity_val_steps"),
    }
)
"""Trainer arguments that may differ when a run is resumed."""

_USERS_DATA_PARAMS = (
    *("transformation_edit_fields", "transformation_removed_fields", "debug_data_loader"),
    *("train_async_data_loader_queue_size", "val_async_data_loader_queue_size"),
)
"""Params that a LightningDataModule gets as keyword arguments of the same names."""


class LightningFramework(TorchFramework):
    """The part of a fit that `LightningEstimator` has by itself."""

    settings_class = LightningSettings
    name = "lightning"
    train = staticmethod(train)
    ranks_log = True
    sent = (*TorchFramework.sent, "logger", "profiler", "trainer_args")
    settings: LightningSettings

    def check_training(self) -> None:
        check_training(self.settings)

    def dry_run(self, columns: Columns) -> Trial:
        settings = self.settings
        module = settings.model

        def batch_of(rows: slice) -> Any:
            given = settings.delivered(take(columns, rows))
            if settings.collate is None:
                given = {name: torch.from_numpy(array.copy()) for name, array in given.items()}
            return BatchForm(settings.column_dtypes, settings.column_shapes).apply(given)

        try:
            batch_of(slice(None))
        except RuntimeError as error:
            raise ShapeError(
                f"input_shapes, label_shapes: the columns cannot be reshaped to "
                f"{settings.column_shapes} ({error}). Set shapes of as many elements as the "
                "columns have."
            ) from error
        features = list(settings.inputs.names)
        trial = try_step(module, num_rows(columns), batch_of, settings.trainer_args)
        shapes: Sequence[tuple[int | None, ...]] | None = None
        if settings.collate is not None:
            spec = settings.tensor_spec
            many, *singles = [
                collated_inputs(module, settings.delivered(take(columns, rows)), spec)
                for rows in (slice(None), slice(1), slice(-1, None))
            ]
            shapes = row_shapes(module, many, spec) or None
            if shapes is not None:
                shapes = with_any_size(shapes, module, spec, singles)
        elif set(features) <= set(columns):  # otherwise a transformation has replaced these columns
            arrays = [columns[name] for name in features]
            spec = settings.tensor_spec
            shapes = row_shapes(module, forward_inputs(module, arrays, spec), spec) or None
        return replace(trial, output_shapes=shapes)

    def tensor_dtype(
        self, name: str, stored: str, trial: Trial
    ) -> tuple[str, Callable[[str], str]]:
        remedy = super().tensor_dtype(name, stored, trial)[1]
        return self.settings.column_dtypes.get(name, stored), remedy

    def model_identity(self, trial: Trial) -> dict[str, Any]:
        identity = super().model_identity(trial)
        settings, module = self.settings, self.settings.model
        arguments = {k: v for k, v in settings.trainer_args.items() if k not in _OF_A_PART}
        identity["trainer_args"] = named(arguments)
        identity["hparams"] = named(dict(module.hparams))
        # As Lightning's tuner sets them.
        rates = {name: getattr(module, name, None) for name in ("learning_rate", "lr")}
        identity["rates"] = named(rates)
        return identity

    def make_spec(self, common: TrainSpec, trial: Trial) -> TrainSpec:
        settings = self.settings
        if isinstance(trial, LightningTrial) and common.data.num_shards > 1:
            check_loss(trial.loss_of_halves)
        self.check_ranks(common.data)
        if trial.takes_one_row is False and settings.train_steps_per_epoch is None:
            check_one_row(settings.model, common.data, trial.takes_one_row)
        check_shards_of_module(settings.model, common.data, settings.trainer_args)
        if not settings.reads_itself:
            common.data.require_rows_in_batches("model: a LightningModule")
            common.data.require_validation_rows()
        if settings.sharding != "none" and common.data.num_shards % common.data.num_ranks:
            raise ParamError(
                f"num_proc: found {common.data.num_ranks} processes for a run that began with "
                f"{common.data.num_shards}. With sharding={settings.sharding!r}, all processes "
                "compute equally often. Set num_proc to a divisor."
            )
        if settings.sharding != "none":
            check_validation_batches(_validation_batches(common.data), settings.sharding)
        trainer_args = settings.trainer_args
        common = replace(
            common,
            callbacks=(),
            use_gpu=common.use_gpu and settings.num_gpus != 0,
            epochs=epochs_of_run(trainer_args, common.epochs, common.data.train_steps_per_epoch),
            backward_passes_per_step=trainer_args.pop(
                "accumulate_grad_batches", common.backward_passes_per_step
            ),
        )
        objects = TrainerObjects(
            module=settings.model,
            callbacks=(*settings.callbacks, *as_list(trainer_args.pop("callbacks", None))),
            logger=trainer_args.pop("logger", settings.logger),
            profiler=trainer_args.pop("profiler", settings.profiler),
            arguments=trainer_args,
        )
        if common.run.checkpoints_path is not None:
            check_links(objects.callbacks, common.store, common.run.checkpoints_path)
        return LightningTrainSpec(
            **vars(common),
            flavor=settings.flavor,
            collectives=self.collectives,
            objects=module_file(objects),
            sharding=settings.sharding_options,
            form=BatchForm(settings.column_dtypes, settings.column_shapes),
            log_every_n_steps=settings.log_every_n_steps,
            users_data={
                "num_reader_epochs": settings.loader_num_epochs,
                **{name: settings.get(name) for name in _USERS_DATA_PARAMS},
            },
        )


def _validation_batches(data: DataSpec) -> list[int]:
    """Return the batches of a validation on each rank, if one of the package's readers reads."""
    plan = data.val_plan
    if plan is None or not isinstance(data.data_module, str):
        return []
    of_shards = [
        min(plan.batches(shard, data.val_batch_size), data.validation_steps_per_epoch)
        for shard in range(data.num_shards)
    ]
    return [sum(of_shards[rank :: data.num_ranks]) for rank in range(data.num_ranks)]


def epochs_of_run(trainer_args: dict[str, Any], epochs: int, steps_per_epoch: int) -> int:
    """Return the number of epochs of a run.

    If steps or time end the run, the function sets ``max_epochs=-1`` in ``trainer_args``.

    Raises
    ------
    ParamError
        If training would do nothing or would not end.
    """
    given = trainer_args.pop("max_epochs", epochs)
    max_steps = trainer_args.get("max_steps", -1)
    if given is None and (max_steps != -1 or trainer_args.get("max_time")):
        given = -1
    given = epochs if given is None else given
    if given > 0:
        return int(given)
    if given != -1 or max_steps == 0:
        raise ParamError(
            f"trainer_args: max_epochs={given}, max_steps={max_steps} train nothing. Set "
            "max_epochs to 1 or more, or to -1 with max_steps or max_time."
        )
    if max_steps == -1 and not trainer_args.get("max_time"):
        raise ParamError(
            "trainer_args: max_epochs=-1 trains without end. Set max_steps or max_time."
        )
    trainer_args["max_epochs"] = -1
    passes = trainer_args.get("accumulate_grad_batches", 1)
    return math.ceil(max_steps * passes / steps_per_epoch) if max_steps > 0 else 1_000_000
