"""Early checks on the driver: of trainer arguments, and of a module on a few rows."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvd_estimators.exceptions import ParamError, ShapeError, did_you_mean
from hvd_estimators.fitting.dry_run import leave_to_ranks
from hvd_estimators.lightning.flavor import Flavor, default_flavor, flavor_of, is_lightning
from hvd_estimators.loading.spec import DataSpec
from hvd_estimators.torch.checks import torch_traceless
from hvd_estimators.torch.outputs import as_list
from hvd_estimators.torch.tensors import TensorSpec

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["adapted_trainer_args", "check_step", "row_shapes"]

logger = logging.getLogger(__name__)

_OURS = {
    "accelerator": "use_gpu",
    "devices": "num_proc",
    "num_nodes": "num_proc",
    "strategy": "num_proc or backend; the strategy is hvd_estimators.lightning.HorovodStrategy",
}

# Trainer arguments that went with Lightning 2, and what does their work.
_GONE = {
    "amp_backend": "precision",
    "auto_scale_batch_size": "batch_size",
    "auto_select_gpus": "use_gpu",
    "checkpoint_callback": "enable_checkpointing",
    "flush_logs_every_n_steps": "a logger's own argument",
    "gpus": "num_gpus",
    "move_metrics_to_cpu": "nothing",
    "num_processes": "num_proc",
    "prepare_data_per_node": "an attribute of the LightningDataModule",
    "process_position": "a progress bar callback",
    "progress_bar_refresh_rate": "verbose",
    "reload_dataloaders_every_epoch": "reload_dataloaders_every_n_epochs",
    "resume_from_checkpoint": "run_id",
    "terminate_on_nan": "the estimator's terminate_on_nan",
    "track_grad_norm": "lightning.pytorch.utilities.grad_norm in on_before_optimizer_step",
    "truncated_bptt_steps": "manual optimization",
    "weights_save_path": "ModelCheckpoint(dirpath=...)",
    "weights_summary": "enable_model_summary",
}

# Hooks that can make what a step needs; without a trainer they have not run.
_PREPARING_HOOKS = (
    "configure_model",
    "on_fit_start",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_train_start",
    "prepare_data",
    "setup",
    "transfer_batch_to_device",
)


def adapted_trainer_args(given: Mapping[str, Any], flavor: Flavor) -> dict[str, Any]:
    """Return arguments for today's Trainer.

    What Lightning 2 no longer knows is left out, with a warning that names what does its work;
    ``stochastic_weight_avg=True`` becomes a callback.

    Raises
    ------
    ParamError
        If an argument is not one of the Trainer's, or would break the distribution.
    """
    known = inspect.signature(flavor.get("Trainer").__init__).parameters
    adapted = {}
    for name, value in given.items():
        if name in _OURS:
            raise ParamError(f"trainer_args: {name!r} is set by the estimator. Set {_OURS[name]}.")
        if name == "stochastic_weight_avg":
            logger.warning(
                "trainer_args: stochastic_weight_avg is gone from Lightning. Add "
                "StochasticWeightAveraging(swa_lrs=...) to callbacks."
            )
            if value:
                adapted["callbacks"] = [
                    *given.get("callbacks", []),
                    flavor.get("callbacks.StochasticWeightAveraging")(swa_lrs=1e-2),
                ]
        elif name in _GONE:
            logger.warning(
                "trainer_args: %s is gone from Lightning and has no effect. Instead: %s.",
                name,
                _GONE[name],
            )
        elif name not in known or name == "self":
            hint = did_you_mean(name, known)
            raise ParamError(f"trainer_args: Lightning's Trainer has no argument {name!r}.{hint}")
        else:
            adapted.setdefault(name, value)
    return adapted


_COUNTED_BATCHES = (
    "fast_dev_run",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "val_check_interval",
)


def check_shards_of_module(
    module: torch.nn.Module,
    data: DataSpec,
    trainer_args: Mapping[str, Any],
    callbacks: Sequence[Any],
) -> None:
    """Refuse what cannot be made to play several shards on a rank. Runs on the driver.

    Parameters
    ----------
    module : torch.nn.Module
        The model, a LightningModule or not.
    data : DataSpec
        What is planned.
    trainer_args : mapping
        The user's arguments of the Trainer.
    callbacks : sequence of object
        The user's callbacks.

    Raises
    ------
    ParamError
        If there are fewer ranks than shards, and something steps or counts batches by itself.
    """
    if not getattr(module, "automatic_optimization", True):
        data.require_one_shard_per_rank("model", "and manual optimization steps by each")
    if any(type(layer).__name__ == "SyncBatchNorm" for layer in module.modules()):
        data.require_one_shard_per_rank("model", "over which SyncBatchNorm takes no statistics")
    for name in _COUNTED_BATCHES:
        if trainer_args.get(name) is not None:
            data.require_one_shard_per_rank(f"trainer_args: {name}", "and this counts them as many")
    if any(is_lightning(c, "callbacks.GradientAccumulationScheduler") for c in callbacks):
        data.require_one_shard_per_rank(
            "callbacks", "and GradientAccumulationScheduler counts them as many"
        )


def check_step(module: LightningModule, batch: Mapping[str, Any]) -> None:
    """Run a training step on a few rows, on a copy, where it can run without a Trainer.

    Raises
    ------
    ShapeError
        If it fails for a reason that has nothing to do with what a Trainer provides.
    """
    flavor = flavor_of(module) or default_flavor()
    is_overridden = flavor.get("utilities.model_helpers.is_overridden")
    if any(is_overridden(hook, module) for hook in _PREPARING_HOOKS):
        return
    trial = copy.deepcopy(module)
    arguments = {"batch": batch, "batch_idx": 0}
    taken = list(inspect.signature(trial.training_step).parameters)
    if "dataloader_iter" in taken:
        return
    try:
        with torch_traceless(), torch.enable_grad():
            trial.training_step(*list(arguments.values())[: max(len(taken), 1)])
    except Exception as error:
        if any(word in str(error) for word in ("Trainer", "trainer")) or leave_to_ranks(error):
            return
        raise ShapeError(
            f"The module's training_step failed on a batch of {_describe(batch)} with "
            f"{type(error).__name__}: {error}. Set feature_cols and label_cols to the columns that "
            "it reads, or column_dtypes (such as {'label': 'int64'}) where it expects other dtypes."
        ) from error


def row_shapes(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], spec: TensorSpec | None = None
) -> list[tuple[int, ...]] | None:
    """Return the shape of one row of each output; None where the module does not take the inputs.

    ``spec`` tells how the module takes inputs and what its outputs are, where these have names.

    A LightningModule can train without a ``forward`` that takes its features.
    """
    trial = copy.deepcopy(module).eval()
    try:
        with torch_traceless():
            raw = trial(*inputs) if spec is None else spec.call(trial, inputs)
            outputs: list[Any] = as_list(raw, () if spec is None else spec.label_cols)
    except Exception as error:
        logger.info("forward() does not take the feature columns (%s)", error)
        return None
    rows = len(inputs[0])
    for output in outputs:
        if not isinstance(output, torch.Tensor) or output.dim() == 0 or len(output) != rows:
            return None
    return [tuple(output.shape[1:]) for output in outputs]


def _describe(batch: Mapping[str, Any]) -> str:
    parts = []
    for name, value in batch.items():
        shape = tuple(getattr(value, "shape", (len(value),)))
        dtype = str(getattr(value, "dtype", "objects")).removeprefix("torch.")
        parts.append(f"{name} {shape} {dtype}")
    return ", ".join(parts)
