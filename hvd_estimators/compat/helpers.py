"""Backend, functions and constants of ``horovod.spark`` that this package itself lacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from hvd_estimators.exceptions import ParamError
from hvd_estimators.launch import spark_backend

# Constants of ``horovod.spark``. `hvd_estimators._util.horovod_spark_names` lists all of them.
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


# Settings of ``horovod.spark.conf``: pairs for ``SparkConf.set(*pair)``. Spark 3.1 renamed
# ``spark.blacklist``, and Spark 4.1 dropped the old names; these are the new ones. They affected
# elastic runs whose tasks Spark restarted; ``run_elastic`` of this package ignores them.
_EXCLUDE = "spark.excludeOnFailure"
_PER_EXECUTOR = f"{_EXCLUDE}.stage.maxFailedTasksPerExecutor"
_PER_NODE = f"{_EXCLUDE}.stage.maxFailedExecutorsPerNode"
_TASK_PER_EXECUTOR = f"{_EXCLUDE}.task.maxTaskAttemptsPerExecutor"
_TASK_PER_NODE = f"{_EXCLUDE}.task.maxTaskAttemptsPerNode"
_APPLICATION_PER_EXECUTOR = f"{_EXCLUDE}.application.maxFailedTasksPerExecutor"
_APPLICATION_PER_NODE = f"{_EXCLUDE}.application.maxFailedExecutorsPerNode"

SPARK_CONF_MAX_INT = str(2**31 - 1)
# Spark compares two of its limits, and one has to be below the other.
SPARK_CONF_MAX_INT_MINUS_ONE = str(2**31 - 2)

SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED = (f"{_EXCLUDE}.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = (f"{_EXCLUDE}.enabled", "true")

SPARK_CONF_REUSE_FAILED_EXECUTOR = (_PER_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (_PER_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE = (_PER_NODE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (_PER_NODE, "1")

SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (_TASK_PER_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (_TASK_PER_EXECUTOR, "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (_TASK_PER_EXECUTOR, "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (_TASK_PER_NODE, SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (_TASK_PER_NODE, "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (_TASK_PER_NODE, "1")

SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (_APPLICATION_PER_EXECUTOR, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (_APPLICATION_PER_EXECUTOR, "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (_APPLICATION_PER_NODE, SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (_APPLICATION_PER_NODE, "1")

# https://spark.apache.org/docs/latest/configuration.html
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    f"{_EXCLUDE}.enabled": "false",
    _PER_EXECUTOR: "2",
    _PER_NODE: "2",
    _TASK_PER_EXECUTOR: "1",
    _TASK_PER_NODE: "2",
    _APPLICATION_PER_EXECUTOR: "2",
    _APPLICATION_PER_NODE: "2",
}
