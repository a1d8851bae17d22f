"""Objects and flags from rank to rank, over ``horovod.tensorflow``."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_estimators.training.objects import Bytes, ObjectExchange

__all__ = ["exchange", "gather_numbers"]


def gather_numbers(value: int, name: str) -> list[int]:
    """Return an integer, or a flag, of every rank, in the order of the ranks."""
    own = tf.constant([value], tf.int64)
    gathered: Sequence[int] = hvd.allgather(own, name=name).numpy().tolist()
    return list(gathered)


def _gather_bytes(document: Bytes, name: str) -> Bytes:
    gathered: Bytes = hvd.allgather(tf.constant(document), name=name).numpy()
    return gathered


exchange = ObjectExchange(hvd.rank, hvd.size, _gather_bytes)
