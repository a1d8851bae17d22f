"""Param of ``horovod.spark`` for reading in worker processes."""

from __future__ import annotations

import logging
from typing import Any

from hvd_estimators.params import DeclaredParams, param
from hvd_estimators.params.estimator import pool_type

logger = logging.getLogger(__name__)


def _upstream_pool_type(name: str, value: Any) -> Any:
    if value != "process":
        return pool_type(name, value)
    logger.warning(
        "%s: threads read instead of processes. Petastorm's worker processes open a port on this "
        "machine, and its other users could run code there.",
        name,
    )
    return "thread"


class UpstreamReading(DeclaredParams):
    """Param of reading; threads read where the caller asks for worker processes."""

    reader_pool_type = param(
        "Kind of parallel readers: 'thread', 'process' (threads read) or 'dummy' (not parallel).",
        default="thread",
        convert=_upstream_pool_type,
    )
