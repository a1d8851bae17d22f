"""How a call gets to the tasks: with the job, or once to each executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import Broadcast, SparkFiles

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["INLINE_BYTES", "AddedFile", "broadcast"]

# Well below the size at which PySpark makes a broadcast variable of a function.
INLINE_BYTES = 2**19
"""Bytes up to which a call travels with the job."""


@dataclass(frozen=True)
class AddedFile:
    """A file that was added to a session of Spark Connect, as tasks get it.

    Attributes
    ----------
    name : str
        Its name.
    """

    name: str

    @property
    def value(self) -> bytes:
        """What it holds. In a task."""
        return Path(SparkFiles.get(self.name)).read_bytes()


@contextlib.contextmanager
def broadcast(context: SparkContext, call: bytes) -> Iterator[bytes | Broadcast[bytes]]:
    """Yield a call as the tasks get it; what that takes on disk is gone when the block ends.

    Of a function above 1 MiB PySpark makes a broadcast variable by itself, whose file stays for as
    long as the application.
    """
    if len(call) <= INLINE_BYTES:
        yield call
        return
    variable = context.broadcast(call)
    try:
        yield variable
    finally:
        variable.destroy()
