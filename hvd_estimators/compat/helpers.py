"""Backend, functions and constants of ``horovod.spark.common`` that this package itself lacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch import spark_backend

__all__ = [
    "ARRAY",
    "BYTES_PER_GIB",
    "CUSTOM_SPARSE",
    "DENSE_VECTOR",
    "METRIC_PRINT_FREQUENCY",
    "MIXED_SPARSE_DENSE_VECTOR",
    "NOCHANGE",
    "PETASTORM_HDFS_DRIVER",
    "SPARSE_VECTOR",
    "TOTAL_BUFFER_MEMORY_CAP_GIB",
    "SparkBackend",
    "default_num_proc",
    "is_databricks",
    "to_list",
]

PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
BYTES_PER_GIB = 2**30


def default_num_proc() -> int:
    """Return the number of task slots, which is the default number of ranks."""
    return spark_backend.SparkBackend().num_processes()


class SparkBackend(spark_backend.SparkBackend):
    """`hvd_estimators.launch.SparkBackend` with the attributes that subclasses rely on.

    ``_num_proc`` is the number of ranks, ``_env`` is the argument ``env``, and ``_kwargs`` is a
    dict of the other arguments.

    Parameters
    ----------
    num_proc, env, **kwargs
        See `hvd_estimators.launch.spark_backend.SparkBackend`.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_proc, env, **kwargs)
        self._kwargs = dict(kwargs)
        if not self._num_proc and SparkSession.getActiveSession() is not None:
            self._num_proc = self.num_processes()


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
