"""``horovod.spark.lightning``: the estimator of Lightning 2, and names and hooks of Lightning 1."""

from __future__ import annotations

import copy
import importlib
from importlib.util import find_spec
from typing import Any

import torch
from lightning_utilities.core.imports import module_available

from hvd_estimators.compat.epoch_ends import EPOCH_END_HOOKS, EpochEnds
from hvd_estimators.compat.torch import TorchEstimator as PlainEstimator
from hvd_estimators.exceptions import ParamError
from hvd_estimators.fitting.framework import Fittable
from hvd_estimators.lightning.estimator import LightningEstimator as NativeEstimator
from hvd_estimators.lightning.framework import LightningFramework
from hvd_estimators.lightning.package import flavor_of, is_lightning, of_flavor
from hvd_estimators.torch.serialization import plain_module

MIN_PL_VERSION = "2.0.0"


class CompatFramework(LightningFramework):
    """Lightning's part of a fit, which also trains modules with hooks of Lightning 1."""

    @classmethod
    def with_objects(cls, estimator: Fittable) -> Fittable:
        estimator = super().with_objects(estimator)
        model: Any = estimator.getOrDefault("model")
        if not isinstance(model, torch.nn.Module):
            return estimator
        if not is_lightning(plain_module(model), "LightningModule"):
            return _for_plain_module(estimator)
        hooks = [name for name in EPOCH_END_HOOKS if callable(getattr(type(model), name, None))]
        if not hooks:
            return estimator
        # Lightning 2 rejects these hooks. The callback calls them.
        hiding = copy.copy(model)
        vars(hiding).update(dict.fromkeys(hooks))
        flavor = flavor_of(model)
        assert flavor is not None
        # The first callback, so that the others see the values that the hooks log.
        callbacks = [of_flavor(EpochEnds, flavor)(), *estimator.getOrDefault("callbacks")]
        return estimator.copy({"model": hiding, "callbacks": callbacks})


class TorchEstimator(NativeEstimator):
    """The estimator, with ``horovod.spark``'s columns and names of metrics.

    A metric is named ``group_<number>_<label>``. Models add no column ``prediction`` by default.
    `hvd_estimators.compat.torch.TorchEstimator` trains a plain ``torch.nn.Module``.
    """

    upstream_names = True
    framework_class = CompatFramework


def _for_plain_module(estimator: Fittable) -> PlainEstimator:
    """Return torch's estimator with the same params; params of Lightning's Trainer do not apply."""
    made = PlainEstimator()
    given = {
        param.name: value
        for param, value in estimator.extractParamMap().items()
        if estimator.isSet(param)
    }
    for name in ("callbacks", "trainer_args"):
        if given.get(name):
            raise ParamError(
                f"{name}: the model is a plain torch.nn.Module, which trains without Lightning. "
                f"Leave {name} out, or set model to a LightningModule."
            )
    made.setParams(**{name: value for name, value in given.items() if made.hasParam(name)})
    made.grid_fit = estimator.grid_fit
    return made


def restore_names() -> None:
    """Restore names that Lightning 2 dropped and libraries import, such as SynapseML."""
    if find_spec("pytorch_lightning") is None:
        return
    utilities = importlib.import_module("pytorch_lightning.utilities")
    if not hasattr(utilities, "_module_available"):
        vars(utilities)["_module_available"] = module_available
