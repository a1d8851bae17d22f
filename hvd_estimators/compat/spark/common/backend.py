"""``horovod.spark.common.backend``: backends that start the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from hvd_estimators.launch import spark_backend
from hvd_estimators.launch.backend import Backend

__all__ = ["Backend", "SparkBackend", "default_num_proc"]


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
