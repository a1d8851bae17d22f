"""``horovod.spark.lightning``: the estimator of Lightning 2, and names of Lightning 1."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from lightning_utilities.core.imports import module_available

from hvd_estimators.lightning.estimator import LightningEstimator as NativeEstimator

MIN_PL_VERSION = "2.0.0"


class TorchEstimator(NativeEstimator):
    """The estimator, with ``horovod.spark``'s columns and names of metrics.

    A metric is named ``group_<number>_<label>``. Models add no column ``prediction`` by default.
    """

    _upstream_names = True


def restore_names() -> None:
    """Restore names that Lightning 2 dropped and libraries import, such as SynapseML."""
    if find_spec("pytorch_lightning") is None:
        return
    utilities = importlib.import_module("pytorch_lightning.utilities")
    if not hasattr(utilities, "_module_available"):
        vars(utilities)["_module_available"] = module_available
