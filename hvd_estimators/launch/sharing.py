"""How a call gets to the tasks: with the job, or once to each executor. Runs on the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import Broadcast

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["shared"]

# Well below the size at which PySpark makes a broadcast variable of a function.
_INLINE_BYTES = 2**19


@contextlib.contextmanager
def shared(context: SparkContext, call: bytes) -> Iterator[bytes | Broadcast[bytes]]:
    """Yield a call as the tasks get it; what that takes on disk is gone when the block ends.

    Of a function above 1 MiB PySpark makes a broadcast variable by itself, whose file stays for as
    long as the application.
    """
    if len(call) <= _INLINE_BYTES:
        yield call
        return
    broadcast = context.broadcast(call)
    try:
        yield broadcast
    finally:
        broadcast.destroy()
