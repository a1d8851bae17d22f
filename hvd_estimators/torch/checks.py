"""Checks of a torch fit's params: model, optimizer, loss, metrics and step. Runs on the driver."""

from __future__ import annotations

import inspect
import logging
from dataclasses import fields
from typing import Any

import torch

from hvd_estimators._util.documents import to_python
from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.fitting.checks import check_class_weight
from hvd_estimators.loading.spec import reads_several
from hvd_estimators.params import functions
from hvd_estimators.torch.callbacks import check_callback
from hvd_estimators.torch.dry_run import check_initialized
from hvd_estimators.torch.objective import check_joint
from hvd_estimators.torch.optimizer_step import StepOptions, check_length, make_scheduler
from hvd_estimators.torch.serialization import (
    check_parameters,
    dump_optimizer,
    load_optimizer,
    plain_module,
)
from hvd_estimators.torch.settings import TorchSettings
from hvd_estimators.torch.shard_state import reductions_of
from hvd_estimators.torch.stateful import is_loadable
from hvd_estimators.training.spec import TrainSpec

logger = logging.getLogger(__name__)

STEP_PARAMS = tuple(field.name for field in fields(StepOptions))
"""Params of the standard training step."""


def check_training(settings: TorchSettings) -> None:
    """Check model, optimizer, loss and metrics together."""
    if not isinstance(settings.model, torch.nn.Module):
        raise ParamError(f"model: expected a torch.nn.Module, found {type(settings.model)}.")
    check_initialized(settings.model)
    if not isinstance(settings.optimizer, torch.optim.Optimizer):
        raise ParamError(
            f"optimizer: expected a torch.optim.Optimizer, found {settings.optimizer!r}."
        )
    needed = settings.train_minibatch_fn is None and _needed_of_step(settings.optimizer)
    if needed:
        raise ParamError(
            f"optimizer: {type(settings.optimizer).__name__}.step() needs {needed}, with which "
            "it runs the model repeatedly. Here a step has one forward and one backward pass "
            "per batch. Set another optimizer, or a "
            "train_minibatch_fn that calls optimizer.step(closure)."
        )
    check_parameters(settings.model, settings.optimizer)
    reductions_of(plain_module(settings.model), settings.buffer_reduction)
    _check_losses(settings)
    for loss in settings.losses_in("loss") or ():
        if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
            raise ParamError(
                f"loss: found the class {loss.__name__}. Set an object of it, {loss.__name__}()."
            )
    _ = settings.column_shapes, settings.metric_groups()
    _check_step(settings)
    for callback in settings.callbacks:
        check_callback(callback)
    step = settings.train_minibatch_fn
    if step is not None and not callable(step):
        raise ParamError(f"train_minibatch_fn: expected a function, found {step!r}.")
    if settings.store.saving_runs():
        _check_extra_state(plain_module(settings.model))


def check_column_dtypes(settings: TorchSettings) -> None:
    """Check that ``column_dtypes`` has only columns that are read."""
    needed = settings.needed_columns
    unknown = sorted(settings.column_dtypes.keys() - {*needed})
    if unknown and not settings.makes_values:
        raise ParamError(
            f"column_dtypes: {unknown[0]!r} is not a column that is read. Set one of "
            f"{', '.join(map(repr, needed))}.{did_you_mean(unknown[0], needed)}"
        )


def check_batch_size(settings: TorchSettings) -> None:
    """Check the params that bound the size of a batch."""
    size_fn, limit = settings.batch_size_fn, settings.max_batch_size
    if size_fn is None and limit is None:
        return
    for name, other in (("batch_size_fn", "max_batch_size"), ("max_batch_size", "batch_size_fn")):
        if settings.get(name) is None:
            raise ParamError(f"{other}: found {settings.get(other)!r} without {name}. Set both.")
    if not callable(size_fn):
        raise ParamError(
            f"batch_size_fn: expected a function of a row, such as lambda row: len(row['tokens']), "
            f"found {size_fn!r}."
        )
    if settings.collate is None:
        raise ParamError(
            "batch_size_fn: it needs collate_fn or padding; without them, all rows have the same "
            "size. Set a smaller batch_size, and raise backward_passes_per_step."
        )
    if settings.train_minibatch_fn is not None:
        raise ParamError(
            "batch_size_fn: found a train_minibatch_fn, which steps by itself. Leave batch_size_fn "
            "out, and split the batch in the function."
        )
    for name, layer in plain_module(settings.model).named_modules():
        if type(layer).__name__ == "SyncBatchNorm":
            raise ParamError(
                f"batch_size_fn: the layer {name!r} is a SyncBatchNorm, whose ranks need equally "
                "many parts. Leave batch_size_fn out, or replace the layer, for example by "
                "LayerNorm."
            )


def check_sharding(settings: TorchSettings) -> None:
    """Check that the ranks can share the model's parameters."""
    mode, module = settings.sharding, settings.model
    if mode == "none":
        for name in ("shard_modules", "activation_checkpointing", "cpu_offload"):
            if settings.get(name):
                raise ParamError(
                    f"{name}: found {settings.get(name)!r} without sharding. Set sharding='full', "
                    f"or leave {name} out."
                )
        return
    if settings.get("collectives") == "horovod":
        raise ParamError(
            f"collectives: found 'horovod' with sharding={mode!r}, which needs torch.distributed. "
            "Set collectives='torch', or leave it out."
        )
    for name in ("train_minibatch_fn", "gradient_compression", "batch_size_fn"):
        if settings.get(name) is not None:
            raise ParamError(
                f"{name}: found {settings.get(name)!r} with sharding={mode!r}, whose ranks compute "
                f"and reduce together. Leave {name} out."
            )
    if settings.validation is not None and not reads_several(settings.data_module):
        raise ParamError(
            f"data_module: found {settings.data_module.__name__} with sharding={mode!r}, whose "
            "ranks validate together, and the class does not tell their numbers of batches. Leave "
            "validation out, or set data_module to 'arrow' or 'petastorm'."
        )
    if settings.precision == "fp16":
        raise ParamError(
            f"precision: found 'fp16' with sharding={mode!r}, which scales no gradients. Set "
            "precision='bf16' or '32'."
        )
    for loss in settings.losses_in("loss") or ():
        if isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters()):
            raise ParamError(
                f"loss: {type(loss).__name__} has parameters, which sharding={mode!r} does not "
                "train. Make the loss a part of the model."
            )
    if plain_module(module) is not module or isinstance(module, torch.jit.ScriptModule):
        raise ParamError(
            f"model: found a {type(module).__name__} with sharding={mode!r}. Set the plain module, "
            "without torch.compile or TorchScript."
        )
    for name, layer in module.named_modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse:
            raise ParamError(
                f"model: the layer {name!r} has sparse gradients, which sharding={mode!r} cannot "
                "reduce. Create it with sparse=False."
            )
    if not settings.makes_layers_on_ranks:
        _check_parts(module, settings)


def _check_parts(module: torch.nn.Module, settings: TorchSettings) -> None:
    """Check that torch can cut the parameters, and compute layers again."""
    for name, parameter in module.named_parameters():
        if not (parameter.dim() and parameter.numel() and parameter.is_contiguous()):
            raise ParamError(
                f"model: the parameter {name!r} of shape {tuple(parameter.shape)} cannot be shared "
                f"with sharding={settings.sharding!r}. Parameters need a dimension, numbers, and "
                "the default memory format: torch.nn.Parameter(torch.ones(1)), not torch.ones(())."
            )
    for layer in settings.sharding_options.layers_of(module):
        for part in layer.modules():
            has_sums = getattr(part, "running_mean", None) is not None
            if settings.activation_checkpointing and has_sums:
                raise ParamError(
                    f"activation_checkpointing: found a {type(part).__name__} in a layer that "
                    "computes again, which would update its running statistics twice. Leave "
                    "activation_checkpointing out, or name other layers in shard_modules."
                )


def _check_step(settings: TorchSettings) -> None:
    """Check clipping, scheduler, precision and class weights."""
    if settings.train_minibatch_fn is not None:
        for name in (*STEP_PARAMS, "class_weight"):
            of_epochs = name == "lr_scheduler" and settings.lr_scheduler_interval == "epoch"
            if settings.differs(name) and not of_epochs:
                raise ParamError(
                    f"{name}: found {settings.get(name)!r} and a train_minibatch_fn, which has its "
                    f"own loss and step. Leave {name} out, and do this in the function."
                )
    _scheduler_of(settings)


def check_scheduler_length(settings: TorchSettings, spec: TrainSpec) -> None:
    """Check that the scheduler has as many steps as training."""
    remedy = "Set total_steps={needed}."
    check_length(_scheduler_of(settings), settings.lr_scheduler_interval, spec, remedy)


def _scheduler_of(settings: TorchSettings) -> Any:
    """Return the scheduler of a copy of the optimizer, or None if there is none."""
    if settings.lr_scheduler is None:
        return None
    module, optimizer = settings.model, settings.optimizer
    copied = load_optimizer(dump_optimizer(optimizer, module), module)
    return make_scheduler(settings.lr_scheduler, copied, settings.lr_scheduler_interval)


def _check_losses(settings: TorchSettings) -> None:
    """Check the loss, or its constructors, against the labels."""
    loss, constructors, labels = settings.loss, settings.loss_constructors, settings.label_cols
    if loss is not None and constructors is not None:
        raise ParamError("Set either loss or loss_constructors.")
    if loss is None and constructors is None:
        if settings.train_minibatch_fn is None or settings.validation is not None:
            raise ParamError(
                "Set either loss or loss_constructors. A train_minibatch_fn that computes its "
                "own loss needs neither, without validation."
            )
        return
    check_class_weight(settings)
    if settings.is_joint:
        _check_joint_loss(settings, "loss" if constructors is None else "loss_constructors")
        return
    if not labels:
        raise ParamError(
            "found [], and loss_form='per_label' compares outputs to labels. Set "
            "loss_form='joint' with a loss that takes outputs (and inputs), or label_cols.",
            param="label_cols",
        )
    for name in ("loss", "loss_constructors"):
        if settings.get(name) is not None:
            settings.losses_per_label(name)
    chosen = settings.outputs
    if chosen is not None and len(chosen) != len(labels):
        raise ParamError(
            f"outputs: expected one per label, {len(labels)}, found {len(chosen)}: {chosen}. "
            "Set loss_form='joint' for one loss of all outputs."
        )


def _check_joint_loss(settings: TorchSettings, name: str) -> None:
    given = functions(name, settings.get(name))
    if len(given) != 1:
        raise ParamError(f"{name}: expected one with loss_form='joint', found {len(given)}.")
    if name == "loss" and settings.is_weighted:
        check_joint(given[0])
    if settings.loss_weights is not None:
        raise ParamError(
            "loss_weights: a joint loss weights its parts itself. Leave loss_weights out."
        )
    labels, chosen = settings.label_cols, settings.outputs
    if settings.metrics and (not labels or (chosen and len(chosen) != len(labels))):
        raise ParamError(
            "metrics: they compare outputs to labels, one to one, found "
            f"label_cols={labels}, outputs={chosen}. Leave metrics out, or set one output per "
            "label in outputs."
        )


def _check_extra_state(model: torch.nn.Module) -> None:
    """Reject a module if a checkpoint could not restore its ``get_extra_state()``."""
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) and not is_loadable(to_python(value)):
            raise ParamError(
                f"model: {name!r} in its state_dict() is more than tensors and plain values: "
                f"found {value!r:.80}. Loading it from a checkpoint would run code from the file. "
                "Return numbers, strings, tensors, and lists and dicts of them from "
                "get_extra_state()."
            )


def _needed_of_step(optimizer: torch.optim.Optimizer) -> str:
    """Return the required arguments of an optimizer's ``step``, such as ``closure``."""
    # Inspect the class's step: a scheduler's replacement on the object has no bound self.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return ", ".join(needed)
