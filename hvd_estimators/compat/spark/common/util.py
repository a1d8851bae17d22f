"""``horovod.spark.common.util``: prepared data and helpers."""

from __future__ import annotations

import os
from typing import Any

from hvd_estimators.compat.left_out import left_out_names
from hvd_estimators.exceptions import ParamError
from hvd_estimators.prepare.dataframe import prepare_data
from hvd_estimators.prepare.datasets import clear_training_cache, get_dataset_properties

__all__ = [
    "clear_training_cache",
    "get_dataset_properties",
    "is_databricks",
    "prepare_data",
    "to_list",
]

__getattr__, __dir__ = left_out_names(__name__)


def is_databricks() -> bool:
    """Return whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a list with one entry per label or feature.

    Parameters
    ----------
    var : object or list
        A value, or a list with one entry, is repeated; None stays None.
    length : int
        The number of entries.

    Raises
    ------
    ParamError
        If a list has another length.
    """
    if var is None:
        return None
    entries = var if isinstance(var, list) else [var]
    if len(entries) == 1:
        return entries * length
    if len(entries) != length:
        raise ParamError(f"expected a list of {length}, or of one, found {len(entries)} entries.")
    return entries
