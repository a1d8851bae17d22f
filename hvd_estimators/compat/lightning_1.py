"""Lightning 1 names that users of ``horovod.spark.lightning`` import, such as SynapseML."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from lightning_utilities.core.imports import module_available

__all__ = ["restore_names"]


def restore_names() -> None:
    """Restore the names that Lightning 2 dropped in ``pytorch_lightning``, if it is installed."""
    if find_spec("pytorch_lightning") is None:
        return
    utilities = importlib.import_module("pytorch_lightning.utilities")
    if not hasattr(utilities, "_module_available"):
        vars(utilities)["_module_available"] = module_available
