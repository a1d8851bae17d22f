"""What the tasks of a job need to know; crosses from the driver to the tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark import Broadcast

from hvd_estimators.launch.task.sharing import AddedFile

__all__ = ["Job"]


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
