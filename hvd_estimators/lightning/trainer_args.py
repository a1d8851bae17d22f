"""Specification of a Lightning rank, and the driver's checks of the Trainer's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hvd_estimators._util.temp_files import LocalFile
from hvd_estimators.exceptions import ParamError, did_you_mean
from hvd_estimators.fitting.trial import traceless
from hvd_estimators.lightning.loaders import BatchForm
from hvd_estimators.lightning.loggers import PROFILERS, quiet
from hvd_estimators.lightning.package import Flavor, is_lightning
from hvd_estimators.torch.sharding import ShardingOptions
from hvd_estimators.training.spec import TrainSpec


@dataclass(frozen=True)
class TrainerObjects:
    """The user's module, and further objects for Lightning's Trainer.

    The objects are serialized together, because they may refer to each other. A callback may hold
    layers of the module, for example. They are pickled even if a backend does not pickle, because
    training changes them.

    Attributes
    ----------
    module : LightningModule
        The module.
    callbacks : tuple of Callback
        Lightning callbacks.
    logger : Logger, sequence of Logger, bool or None
        The run's loggers.
    profiler : Profiler, str or None
        The run's profiler.
    arguments : mapping
        Further arguments of the Trainer.
    """

    module: Any
    callbacks: tuple[Any, ...]
    logger: Any
    profiler: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class LightningTrainSpec(TrainSpec):
    """Spec of a Lightning rank.

    Attributes
    ----------
    flavor : Flavor
        Lightning's package.
    collectives : str
        ``"horovod"`` or ``"torch"``, see `choose_collectives`.
    objects : LocalFile
        A `TrainerObjects`, see `module_file`.
    form : BatchForm
        The tensors that a LightningModule gets.
    log_every_n_steps : int
        Steps between two entries of the loggers.
    users_data : mapping
        Extra keyword arguments for the user's LightningDataModule.
    sharding : ShardingOptions
        Whether and how the ranks share the parameters.
    """

    flavor: Flavor
    collectives: str
    objects: LocalFile
    form: BatchForm
    log_every_n_steps: int
    users_data: Mapping[str, Any]
    sharding: ShardingOptions


_SET_BY_ESTIMATOR = {
    "accelerator": "use_gpu",
    "devices": "num_proc",
    "num_nodes": "num_proc",
    "strategy": "num_proc, backend or sharding",
}


# Values of these types can be checked on any machine, because they request no device.
_PLAIN = (bool, int, float, str, type(None))

_FOR_TRIALS = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
"""Arguments of a Trainer that only checks other arguments."""

_FINDERS = {"LearningRateFinder": "the optimizer's rate", "BatchSizeFinder": "batch_size"}
"""Callbacks that search for a value before training."""

_OF_DEVICES = ("benchmark", "deterministic", "precision", "sync_batchnorm", "detect_anomaly")


def check_trainer_args(arguments: Mapping[str, Any], flavor: Flavor) -> None:
    """Check that the Trainer accepts the callbacks and the arguments with plain values.

    Raises
    ------
    ParamError
        If it does not, or if an argument would break distributed training.
    """
    parameters = inspect.signature(flavor.get("Trainer").__init__).parameters
    for name in arguments:
        if name in _SET_BY_ESTIMATOR:
            raise ParamError(
                f"trainer_args: {name!r} is set by the estimator. Set {_SET_BY_ESTIMATOR[name]}."
            )
        if name not in parameters or name == "self":
            hint = did_you_mean(name, parameters)
            raise ParamError(f"trainer_args: Lightning's Trainer has no argument {name!r}.{hint}")
    if arguments.get("overfit_batches"):
        raise ParamError(
            "trainer_args: overfit_batches repeats batches on one process only. Fit on a few rows "
            "instead, as in df.limit(100)."
        )
    check_callbacks("trainer_args: callbacks", as_list(arguments.get("callbacks")))
    plain_args = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, _PLAIN) and name not in (*_OF_DEVICES, "logger", "profiler")
    }
    passes = arguments.get("accumulate_grad_batches", 1)
    if not isinstance(passes, Integral) or passes < 1:
        raise ParamError(
            f"trainer_args: accumulate_grad_batches: expected 1 or more, found {passes!r}."
        )
    misconfigured = flavor.get("utilities.exceptions.MisconfigurationException")
    with traceless(), quiet():
        try:
            flavor.get("Trainer")(**{**plain_args, **_FOR_TRIALS, "barebones": False})
        except (TypeError, ValueError, misconfigured) as error:
            raise ParamError(
                f"trainer_args: Lightning's Trainer rejects them ({error}). Found {plain_args!r}. "
                "Change the argument that the error names."
            ) from error


def precision_of(arguments: Mapping[str, Any], flavor: Flavor) -> Any:
    """Return Lightning's precision plugin for the user's Trainer arguments, on the CPU."""
    for plugin in as_list(arguments.get("plugins")):
        if is_lightning(plugin, "plugins.Precision"):
            return plugin
    given = {"precision": arguments.get("precision"), **_FOR_TRIALS}
    with traceless(), quiet():
        return flavor.get("Trainer")(**given).precision_plugin


def as_list(value: Any) -> list[Any]:
    """Return a list of the given values: several, one or zero."""
    if value is None:
        return []
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return [value]


def check_callbacks(name: str, callbacks: Sequence[Any]) -> None:
    """Check that the values of a param are instances of Lightning's Callback that ranks can run.

    Raises
    ------
    ParamError
        If they are not.
    """
    for callback in callbacks:
        if not _is_instance(callback, "Callback"):
            raise ParamError(
                f"{name}: expected instances of Lightning's Callback, found {callback!r}."
            )
        for finder, setting in _FINDERS.items():
            if is_lightning(callback, f"callbacks.{finder}"):
                raise ParamError(
                    f"{name}: found a {type(callback).__name__}, whose trial steps do not work on "
                    f"ranks. Leave it out, and set {setting}. lightning.pytorch.tuner.Tuner finds "
                    "a value on one process, with a Trainer and some of the rows."
                )


def _is_instance(value: Any, path: str) -> bool:
    return not isinstance(value, type) and is_lightning(value, path)


def check_objects(loggers: Any, profiler: Any) -> None:
    """Check that loggers and profiler have the expected types.

    Raises
    ------
    ParamError
        If they do not.
    """
    for entry in as_list(loggers):
        if not (isinstance(entry, bool) or _is_instance(entry, "loggers.Logger")):
            raise ParamError(
                f"logger: expected Lightning's loggers, or False for none, found {entry!r}."
            )
    is_profiler = _is_instance(profiler, "profilers.Profiler")
    is_name = isinstance(profiler, str) and profiler in PROFILERS
    if not (profiler is None or is_profiler or is_name):
        raise ParamError(
            "profiler: expected a Profiler of Lightning's, or one of "
            f"{', '.join(map(repr, PROFILERS))}, found {profiler!r}."
        )


def check_module(module: Any, flavor: Flavor) -> None:
    """Check that a LightningModule defines the methods that the Trainer calls.

    Raises
    ------
    ParamError
        If a method is missing.
    """
    base = flavor.get("LightningModule")
    for name in ("training_epoch_end", "validation_epoch_end"):
        if callable(getattr(module, name, None)):
            raise ParamError(
                f"model: Lightning 2 has no {name}(outputs), which {type(module).__name__} "
                f"defines. Rewrite it as on_{name.replace('training', 'train')}(self)."
            )
    for method in ("training_step", "configure_optimizers"):
        is_own = method in vars(module) or getattr(type(module), method) is not getattr(
            base, method
        )
        if not is_own:
            raise ParamError(
                f"model: the LightningModule {type(module).__name__} has no {method}(). Define it."
            )
