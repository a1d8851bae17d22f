"""Names of Lightning 1 that libraries on ``horovod.spark.lightning`` import (SynapseML does)."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from lightning_utilities.core.imports import module_available

__all__ = ["restore_names"]


def restore_names() -> None:
    """Give ``pytorch_lightning``, where it is installed, the names that Lightning 2 has dropped."""
    if find_spec("pytorch_lightning") is None:
        return
    utilities = importlib.import_module("pytorch_lightning.utilities")
    if not hasattr(utilities, "_module_available"):
        vars(utilities)["_module_available"] = module_available
