"""Lightning's params, their checks and the objects made from them. Runs on the driver."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvd_estimators.exceptions import ParamError
from hvd_estimators.lightning.loaders import is_lightning_data
from hvd_estimators.lightning.loggers import PROFILERS
from hvd_estimators.lightning.package import Flavor, is_lightning, one_flavor
from hvd_estimators.lightning.trainer_args import (
    as_list,
    check_callbacks,
    check_module,
    check_objects,
    check_trainer_args,
)
from hvd_estimators.loading.transform import Transformation
from hvd_estimators.params import boolean, integer, keyword_arguments, objects, param
from hvd_estimators.torch.dry_run import check_modes
from hvd_estimators.torch.estimator import TorchEstimator
from hvd_estimators.torch.serialization import dump_module, load_module, plain_module
from hvd_estimators.torch.shard_state import reductions_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def _profiler(name: str, value: Any) -> Any:
    if isinstance(value, str) and value not in PROFILERS:
        raise ParamError(
            f"{name}: expected a Profiler or one of {', '.join(map(repr, PROFILERS))}, found "
            f"{value!r}."
        )
    return value


_OF_LIGHTNING = {
    "gradient_clip_norm": "trainer_args={'gradient_clip_val': ...}",
    "gradient_clip_value": (
        "trainer_args={'gradient_clip_val': ..., 'gradient_clip_algorithm': 'value'}"
    ),
    "lr_scheduler": "a scheduler in the module's configure_optimizers()",
    "lr_scheduler_interval": "the scheduler's interval in configure_optimizers()",
    "loggers": "logger, to Lightning's own such as its WandbLogger",
    "precision": "trainer_args={'precision': 'bf16-mixed'} or '16-mixed'",
}
"""Params of TorchEstimator for which Lightning has its own settings."""


class LightningParams(TorchEstimator):
    """Params of Lightning's Trainer and of the module that it trains."""

    callbacks = param("Lightning callbacks.", default=[], convert=objects)
    num_gpus = param(
        "GPUs per rank: 0 or 1. Default: 1 if the rank has a GPU.",
        convert=integer(0),
        accessor="NumGPUs",
    )
    logger = param(
        "Lightning logger, or a list of loggers; they write to the run's logs. Default: "
        "TensorBoard, or CSV files if TensorBoard is not installed. False disables logging. An "
        "MLflow logger writes to the run's logs only if it uses a folder and the store is "
        "local; otherwise it keeps its server or database."
    )
    log_every_n_steps = param(
        "Steps between two records of the loggers.", default=50, convert=integer(1)
    )
    profiler = param(
        "Lightning profiler, or 'simple', 'advanced' or 'pytorch'; it writes to the run's logs.",
        convert=_profiler,
    )
    trainer_args = param(
        "Further arguments of Lightning's Trainer. They replace the estimator's arguments.",
        convert=keyword_arguments,
    )
    data_module = param(
        "Reader of the rows: 'petastorm', 'arrow', a subclass of "
        "hvd_estimators.loading.readers.DataModule, or a LightningDataModule class. Default: "
        "Petastorm if the driver can import it, otherwise PyArrow.",
        type="str | type[Any]",
    )
    loader_num_epochs = param(
        "Epochs that a LightningDataModule's reader reads, passed to it as num_reader_epochs. "
        "Default: no end, like the built-in readers.",
        convert=integer(1),
    )
    debug_data_loader = param("Passed to a LightningDataModule.", default=False, convert=boolean)
    train_async_data_loader_queue_size = param(
        "Passed to a LightningDataModule. The built-in readers read a bounded number of bytes "
        "ahead."
    )
    val_async_data_loader_queue_size = param(
        "Passed to a LightningDataModule; see train_async_data_loader_queue_size."
    )

    _sent = (*TorchEstimator._sent, "logger", "profiler", "trainer_args")

    def _check_params(self) -> None:
        get = self.getOrDefault
        super()._check_params()
        if (get("num_gpus") or 0) > 1:
            raise ParamError(
                f"num_gpus: a rank trains on one GPU, found {get('num_gpus')}. Set num_proc to the "
                "number of GPUs."
            )
        flavor = self._flavor()
        check_objects(get("logger"), get("profiler"))
        check_trainer_args(get("trainer_args") or {}, flavor, get("callbacks"))
        check_modes(get("model"))
        check_module(get("model"), flavor)

    def _check_callbacks(self) -> None:
        check_callbacks("callbacks", self.getOrDefault("callbacks"))

    def _flavor(self) -> Flavor:
        """Return the Lightning package that the user's objects belong to."""
        return one_flavor(self._lightning_objects())

    def _lightning_objects(self) -> Iterator[tuple[str, Any]]:
        get = self.getOrDefault
        for name in ("model", "data_module", "callbacks", "logger", "profiler"):
            for given in as_list(get(name)):
                yield name, given
        for name, value in (get("trainer_args") or {}).items():
            for given in as_list(value):
                yield f"trainer_args: {name}", given

    def _check_reading(self) -> None:
        if not is_lightning_data(self.getOrDefault("data_module")):
            super()._check_reading()

    def _check_training(self) -> None:
        """Check model, optimizer and loss together."""
        get = self.getOrDefault
        for name, own in _OF_LIGHTNING.items():
            if self.isSet(name) and get(name) != self._defaults().get(name):
                raise ParamError(f"{name}: it is a param of TorchEstimator. Set {own}.")
        if not is_lightning(get("model"), "LightningModule"):
            if is_lightning(plain_module(get("model")), "LightningModule"):
                raise ParamError(
                    "model: found a LightningModule that torch.compile has wrapped, which hides "
                    "its steps. Give the LightningModule itself, and compile its networks in "
                    "configure_model(), as in self.net = torch.compile(self.net)."
                )
            raise ParamError(
                f"model: expected a LightningModule, found {type(get('model'))}. Set a "
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
            if self.isSet(name) and get(name) not in (None, []):
                raise ParamError(
                    f"{name}: a LightningModule brings its own. Leave {name} out, or train a plain "
                    "torch.nn.Module with TorchEstimator."
                )
        self._column_shapes()
        is_overridden = self._flavor().get("utilities.model_helpers.is_overridden")
        if not is_overridden("configure_model", get("model")):
            reductions_of(get("model"), get("buffer_reduction"))
        self._check_callbacks()
        if not get("model").automatic_optimization:
            self._check_accumulation("the module optimizes manually, and accumulates by itself")
        if get("backward_passes_per_step") > 1 and not get("model").automatic_optimization:
            raise ParamError(
                "backward_passes_per_step: the module optimizes manually and accumulates gradients "
                "itself. Leave it out."
            )

    def _check_accumulation(self, reason: str) -> None:
        passes = (self.getOrDefault("trainer_args") or {}).get("accumulate_grad_batches", 1)
        if passes > 1:
            raise ParamError(
                f"trainer_args: found accumulate_grad_batches={passes}, and {reason}. Leave it out."
            )

    def _transformation(self) -> Transformation | None:
        transformation = super()._transformation()
        if transformation is None:
            return None
        # A LightningModule can ignore any field of a batch.
        return replace(transformation, all_needed=False)

    def _lightning_module(self) -> LightningModule:
        """Return the module to train, with the param ``learning_rate`` if it is set."""
        rate = self.getOrDefault("learning_rate")
        module: LightningModule = _with_learning_rate(self.getOrDefault("model"), rate)
        return module


def _with_learning_rate(module: Any, rate: float | None) -> Any:
    """Return a module, or a copy with the learning rate set as Lightning's tuner sets it."""
    if rate is None:
        return module
    module = load_module(dump_module(module))
    is_set = False
    for name in ("learning_rate", "lr"):
        if hasattr(module, name):
            setattr(module, name, rate)
            is_set = True
        if name in module.hparams:
            module.hparams[name] = rate
            is_set = True
    if is_set:
        return module
    raise ParamError(
        "learning_rate: the LightningModule has neither learning_rate nor lr, itself or in its "
        "hparams. Give it one, which configure_optimizers() uses."
    )


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
