"""Checks of a Lightning fit's params. Runs on the driver."""

from __future__ import annotations

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning.package import averages_weights, is_lightning
from hvd_estimators.lightning.settings import LightningSettings
from hvd_estimators.lightning.trainer_args import (
    as_list,
    check_callbacks,
    check_module,
    check_objects,
    check_trainer_args,
)
from hvd_estimators.torch.serialization import plain_module
from hvd_estimators.torch.shard_state import reductions_of

_OF_LIGHTNING = {
    **dict.fromkeys(
        ("batch_size_fn", "max_batch_size"),
        "a smaller batch_size and a larger backward_passes_per_step",
    ),
    "gradient_clip_norm": "trainer_args={'gradient_clip_val': ...}",
    "gradient_clip_value": (
        "trainer_args={'gradient_clip_val': ..., 'gradient_clip_algorithm': 'value'}"
    ),
    "learning_rate": "the rate in the module's configure_optimizers()",
    "lr_scheduler": "a scheduler in the module's configure_optimizers()",
    "lr_scheduler_interval": "the scheduler's interval in configure_optimizers()",
    "loggers": "logger, to Lightning's own such as its WandbLogger",
    "precision": "trainer_args={'precision': 'bf16-mixed'} or '16-mixed'",
}
"""Params of TorchEstimator for which Lightning has its own settings."""


def check_training(settings: LightningSettings) -> None:
    """Check model, optimizer and loss together."""
    for name, own in _OF_LIGHTNING.items():
        if settings.differs(name):
            raise ParamError(f"{name}: it is a param of TorchEstimator. Set {own}.")
    if not is_lightning(settings.model, "LightningModule"):
        if is_lightning(plain_module(settings.model), "LightningModule"):
            raise ParamError(
                "model: found a LightningModule that torch.compile has wrapped, which hides "
                "its steps. Give the LightningModule itself, and compile its networks in "
                "configure_model(), as in self.net = torch.compile(self.net)."
            )
        raise ParamError(
            f"model: expected a LightningModule, found {type(settings.model)}. Set a "
            "LightningModule, or train the module with TorchEstimator, which takes optimizer "
            "and loss."
        )
    for name in (
        "optimizer",
        "loss",
        "loss_weights",
        "loss_constructors",
        "class_weight",
        "loss_form",
        "metrics",
        "train_minibatch_fn",
        "stateful",
    ):
        if name in settings.given and settings.get(name) not in (None, []):
            raise ParamError(
                f"{name}: a LightningModule brings its own. Leave {name} out, or train a plain "
                "torch.nn.Module with TorchEstimator."
            )
    _ = settings.column_shapes
    if not settings.makes_layers_on_ranks:
        reductions_of(settings.model, settings.buffer_reduction)
    check_callbacks("callbacks", settings.callbacks)
    if settings.sharding != "none":
        _check_sharding(settings)
    check_trainer_args(settings.trainer_args, settings.flavor)
    if not settings.model.automatic_optimization:
        passes = settings.trainer_args.get("accumulate_grad_batches", 1)
        if passes > 1:
            raise ParamError(
                f"trainer_args: found accumulate_grad_batches={passes}, and the module optimizes "
                "manually, and accumulates by itself. Leave it out."
            )
        if settings.backward_passes_per_step > 1:
            raise ParamError(
                "backward_passes_per_step: the module optimizes manually and accumulates gradients "
                "itself. Leave it out."
            )
    if (settings.num_gpus or 0) > 1:
        raise ParamError(
            f"num_gpus: a rank trains on one GPU, found {settings.num_gpus}. Set num_proc to the "
            "number of GPUs."
        )
    check_objects(settings.logger, settings.profiler)
    check_module(settings.model, settings.flavor)


def _check_sharding(settings: LightningSettings) -> None:
    """Check that Lightning's part of a fit works on parts of the parameters."""
    mode = f"sharding={settings.sharding!r}"
    if not settings.model.automatic_optimization:
        raise ParamError(
            f"model: found manual optimization with {mode}, which gathers parameters for whole "
            "steps. Set automatic_optimization=True, or leave sharding out."
        )
    precision = settings.trainer_args.get("precision")
    if precision in ("16-mixed", "16", 16):
        raise ParamError(
            f"trainer_args: found precision={precision!r} with {mode}, which scales no gradients. "
            "Set 'bf16-mixed' or '32'."
        )
    callbacks = [*settings.callbacks, *as_list(settings.trainer_args.get("callbacks"))]
    for callback in callbacks:
        if averages_weights(callback):
            raise ParamError(
                f"callbacks: found a {type(callback).__name__} with {mode}, which copies a "
                "whole module. Leave the callback or sharding out."
            )
