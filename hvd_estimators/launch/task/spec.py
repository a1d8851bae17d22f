"""Job specification, sent from the driver to the tasks, once per executor."""

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
    """Settings that every task needs.

    Attributes
    ----------
    call : bytes, Broadcast or AddedFile
        Result of `pickle_call`.
    max_bytes : int
        Maximum size of an outcome.
    secret : bytes
        Secret with which tasks prove to each other that they belong to this job.
    one_machine : bool
        Whether all tasks are known to run on one machine.
    events : dict
        Environment variables with the address to which ranks send events.
    streams : tuple of str
        Streams whose lines the driver receives; an empty name means both streams as one.
    apart : bool
        Whether ranks have a separate pipe for each stream.
    modules : tuple of str or None
        Modules to import in a process that forks ranks; None starts each rank in a fresh process.
    exchange : str
        Address of the driver's `ExchangeServer`; empty if there is none.
    nics : tuple of str
        Names of the network interfaces to use; empty means any.
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
    versions: dict[str, str] = field(default_factory=dict)


# Well below the size at which PySpark turns a function into a broadcast variable.
INLINE_BYTES = 2**19
"""Maximum size, in bytes, of a call that is sent with the job itself."""


@dataclass(frozen=True)
class AddedFile:
    """File added to a Spark Connect session, as tasks receive it.

    Attributes
    ----------
    name : str
        The file's name.
    """

    name: str

    @property
    def value(self) -> bytes:
        """The file's content. Runs in a task."""
        return Path(SparkFiles.get(self.name)).read_bytes()


@contextlib.contextmanager
def broadcast(context: SparkContext, call: bytes) -> Iterator[bytes | Broadcast[bytes]]:
    """Yield a call in the form that tasks receive; free its disk space when the block ends.

    PySpark itself broadcasts a function above 1 MiB, whose file remains as long as the application.
    """
    if len(call) <= INLINE_BYTES:
        yield call
        return
    variable = context.broadcast(call)
    try:
        yield variable
    finally:
        variable.destroy()
