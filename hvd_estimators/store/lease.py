"""The lease of a run: one fit at a time trains it, of all processes on all machines.

Runs on the driver. ``runs/<run_id>/lease.json`` names the process that holds the lease; see
`hvd_estimators.store.claims` for when a holder counts as gone. What is guaranteed:

- Where a store creates files exclusively (`Store.creates_exclusively`), of several processes that
  take a free lease exactly one gets it.
- Elsewhere, and where a lease is taken over from a holder that is gone, each process writes the
  file, lets `SETTLE_SECONDS` pass, and reads it again: who wrote last has it. Two of them may both
  believe to have it only where a write took longer than that to be seen.
- A holder that was taken for gone (its machine was asleep for minutes, or did not reach the store)
  finds out when it next writes its heartbeat, and says so. Its ranks find out before they next
  write a checkpoint, see `hvd_estimators.store.fence`.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from types import TracebackType

from typing_extensions import Self

from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.owners import Owner, is_here, this_process
from hvd_estimators.store.claims import (
    HEARTBEAT_SECONDS,
    STALE_SECONDS,
    Claim,
    Heartbeat,
    is_abandoned,
    read_claim,
)
from hvd_estimators.store.files import Files
from hvd_estimators.store.paths import RunPaths

__all__ = [
    "LAUNCH",
    "SETTLE_SECONDS",
    "RunLease",
    "await_free",
    "holder",
    "lease_path",
    "read_if_there",
    "require_free",
]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0


LAUNCH = "launch"
"""Detail of a lease: which launch of ranks its holder has come to, if not the first."""

SETTLE_SECONDS = 1.0
"""Time in which a file that was written is seen by all."""


def lease_path(run_path: str) -> str:
    """Return the path of a run's lease."""
    return f"{run_path}/lease.json"


def holder(store: Files, run_path: str) -> Claim | None:
    """Return who holds a run's lease; None where nobody does, or the holder is gone."""
    path = lease_path(run_path)
    content = read_if_there(store, path)
    if content is None:
        return None
    try:
        claim = Claim.from_json(content)
    except ValueError:
        claim = Claim(Owner("", 0, ""))  # its age alone tells
    return None if is_abandoned(store, path, claim) else claim


def read_if_there(store: Files, path: str) -> bytes | None:
    """Return the content of a file; None where there is none."""
    try:
        return store.read(path)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def require_free(store: Files, run: RunPaths) -> None:
    """Make sure that nobody holds a run's lease.

    Raises
    ------
    ParamError
        If somebody does; it says who, and since when.
    """
    held = holder(store, run.run_path)
    if held is not None:
        raise _refused(run, held)


def await_free(store: Files, run: RunPaths) -> None:
    """Make sure that nobody holds a run's lease; wait where its holder may be gone.

    One that was killed on another machine counts as gone `STALE_SECONDS` after its last heartbeat.
    One that lives is told by its next heartbeat, within half a minute.

    Raises
    ------
    ParamError
        If somebody holds it, and lives.
    """
    first = held = holder(store, run.run_path)
    deadline = time.monotonic() + STALE_SECONDS + 2 * HEARTBEAT_SECONDS
    while held is not None and first is not None:
        has_beaten = (held.token, held.beaten) != (first.token, first.beaten)
        if has_beaten or is_here(held.owner) or time.monotonic() > deadline:
            raise _refused(run, held)
        if held is first:
            logger.warning(
                "run_id: %r was being trained by %s. Whether that process still lives is seen by "
                "its heartbeats; without any the run is free after %g minutes.",
                *(run.run_id, held.owner, STALE_SECONDS / 60),
            )
        time.sleep(_POLL_SECONDS)
        held = holder(store, run.run_path)


class RunLease:
    """A run's lease, until the block ends.

    Parameters
    ----------
    store : Files
        Keeps the run.
    run : RunPaths
        The run.
    patient : bool
        Whether to wait where the holder may be gone, see `await_free`.

    Raises
    ------
    ParamError
        By `__enter__` and `confirm`, if somebody else holds it.
    """

    def __init__(self, store: Files, run: RunPaths, *, patient: bool = False) -> None:
        self._store = store
        self._run = run
        self._require_free = await_free if patient else require_free
        self._path = lease_path(run.run_path)
        self._heartbeat = Heartbeat(store, self._path, {"run_id": run.run_id})
        self._certain_at: float | None = None

    def __enter__(self) -> Self:
        # Other threads of this process take a claim of theirs for dead that has no heartbeat.
        self._heartbeat.announce()
        try:
            if not self._created():
                self._require_free(self._store, self._run)
                self._certain_at = time.monotonic() + SETTLE_SECONDS
            self._heartbeat.start()
        except BaseException:
            self._heartbeat.stop()
            raise
        return self

    def _created(self) -> bool:
        """Return whether the lease was free, and is certainly this one's now."""
        if not self._store.creates_exclusively:
            return False
        now = datetime.now(timezone.utc)
        claim = Claim(this_process(), now, now, self._heartbeat.token)
        return self._store.write_new(self._path, claim.to_json())

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._heartbeat.stop()

    @property
    def lost(self) -> bool:
        """Whether somebody else has taken it, who took this process for gone."""
        return self._heartbeat.lost

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    @property
    def token(self) -> str:
        """What tells this lease from others of the run."""
        return self._heartbeat.token

    def note_launch(self, number: int) -> None:
        """Let ranks of earlier launches know that they are not to write to the run any more.

        Raises
        ------
        StoreError, OSError
            If it cannot be noted.
        """
        self._heartbeat.note(**{LAUNCH: number})

    def confirm(self) -> None:
        """Make sure that nobody has taken the lease at the same moment; may wait for a second.

        To be called before anything is written to the run's folder.
        """
        if self._certain_at is None:
            return
        time.sleep(max(self._certain_at - time.monotonic(), 0))
        self._certain_at = None
        claim = read_claim(self._store, self._path)
        if claim is not None and claim.token != self._heartbeat.token:
            self._heartbeat.stop()
            raise _refused(self._run, claim)


def _refused(run: RunPaths, held: Claim) -> ParamError:
    since = "" if held.created is None else f" since {held.created:%Y-%m-%d %H:%M:%S} UTC"
    if held.owner == this_process():
        return ParamError(
            f"run_id: {run.run_id!r} is being trained by another fit of this application{since}, "
            "which writes the same checkpoints. Set another run_id, or none."
        )
    beaten = "" if held.beaten is None else f" (last heartbeat {held.beaten:%H:%M:%S} UTC)"
    return ParamError(
        f"run_id: {run.run_id!r} is being trained by {held.owner}{since}{beaten}, which writes the "
        "same checkpoints. Set another run_id, or none, or wait until that fit has ended. If that "
        f"process is no more, this run is free {STALE_SECONDS / 60:g} minutes after its last "
        f"heartbeat, or as soon as {lease_path(run.run_path)!r} is deleted."
    )
