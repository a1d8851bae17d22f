"""Job specification: crosses from the driver to the tasks, once to each executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import Broadcast, SparkFiles

if TYPE_CHECKING:
    from pyspark import SparkContext

__all__ = ["INLINE_BYTES", "AddedFile", "Job", "broadcast"]


@dataclass(frozen=True)
class Job:
    """What every task needs.

    ``call`` is what `pickle_call` returned, ``max_bytes`` what an outcome may have at most,
    ``secret`` what tasks prove to each other with that they are of this job. ``one_machine`` says
    whether all of them are known to run on one. ``events`` are the variables that tell ranks where
    the driver takes events. ``streams`` are those whose lines it gets (empty: both as one), and
    ``apart`` says whether ranks have a pipe for each. ``modules`` are what a process may
    import that forks ranks; None starts each rank in a fresh process. ``exchange`` is where the
    driver takes what tasks tell each other; empty if it does not. ``nics`` are the names of the
    network interfaces to use; none means any. ``timeline`` says whether the driver wants Horovod's
    timeline.
    """

    call: bytes | Broadcast[bytes] | AddedFile = field(repr=False)
    max_bytes: int
    secret: bytes = field(repr=False)
    one_machine: bool
    driver_env: dict[str, str] = field(repr=False)
    env: dict[str, str | None] = field(repr=False)
    events: dict[str, str] = field(repr=False)
    driver_path: tuple[str, ...]
    executable: str | None
    verbose: int
    streams: tuple[str, ...] = ()
    apart: bool = False
    modules: tuple[str, ...] | None = None
    exchange: str = ""
    nics: tuple[str, ...] = ()
    timeline: bool = False
    versions: dict[str, str] = field(default_factory=dict)


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
