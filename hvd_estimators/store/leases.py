"""Leases of runs and datasets: at most one owner at a time, across all hosts.

A lease is a small file, the lease record, that names the owning process (`ProcessIdentity`). The
record of a run is ``runs/<run_id>/lease.json``. A `Heartbeat` rewrites the record every
`HEARTBEAT_SECONDS`. Other processes use it to decide if the owner is dead:

- On the owner's machine, the operating system decides. A process that is stopped, or whose machine
  was asleep, counts as alive there, whatever the age of its last heartbeat.
- On another machine, the owner counts as dead if its last heartbeat is older than `STALE_SECONDS`.
  A process that was paused for longer therefore counts as dead. It notices this when it resumes,
  because it checks its ownership before each heartbeat (`Heartbeat.lost`).

If the store records modification times, only the store's clock determines the age of a heartbeat.
The age is then the difference between the times of the record and of a probe file written now.
Otherwise the owner's clock is compared with the reader's clock (both UTC). A reader whose clock is
fast then considers the owner dead too early by the difference. A reader whose clock is slow does so
too late. The difference is harmless below `STALE_SECONDS` minus two heartbeats, which is four
minutes. `Store.list_runs`, which writes nothing, compares the record's time with its own clock.

Guarantees:

- If the store creates files exclusively (`Store.creates_exclusively`), exactly one of several
  processes that compete for a free lease gets it.
- Otherwise, and when a lease is taken over from a dead owner, each process writes the file, waits
  `SETTLE_SECONDS`, and reads the file again. The last writer owns the lease. Two processes can both
  believe that they own it only if a write takes longer than that to become visible.
- An owner can be wrongly considered dead if its machine was asleep for minutes or could not reach
  the store. It then logs a warning at its next heartbeat. Its ranks find out before they write
  their next checkpoint.

A rank can outlive its launch by some seconds if it may still save its current step. It can outlive
it longer if its machine is disconnected or its process was stopped. Meanwhile, its driver may have
relaunched the ranks, or another application may have taken over the run. The run's lease shows both
cases: it has a different token or a later launch number (`FencingToken`).

Leases are taken on the driver; ranks check their `FencingToken`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import posixpath
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Self

from hvd_estimators._util.documents import parse_object
from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, is_here, this_process
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.files import Files
from hvd_estimators.store.paths import RunPaths
from hvd_estimators.store.retries import at_exit

logger = logging.getLogger(__name__)


HEARTBEAT_SECONDS = 30.0
"""Interval at which the owner rewrites a lease record."""

STALE_SECONDS = 300.0
"""Age of the last heartbeat above which an owner on another machine counts as dead."""

SETTLE_SECONDS = 1.0
"""Time after which all processes see a written file."""

LAUNCH = "launch"
"""Key of the lease detail that holds the launch number; absent for the first launch."""

_EXIT_SECONDS = 10.0
"""Maximum wait at interpreter exit for a heartbeat that is being written."""

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class LeaseRecord:
    """Content of a lease file: the owner and its last heartbeat.

    Attributes
    ----------
    owner : ProcessIdentity
        The process that owns the lease.
    created, beaten : datetime.datetime or None
        Time of creation and of the last heartbeat, by the owner's clock, in UTC.
    token : str
        Distinguishes this lease from the owner's other leases, including earlier ones of the same
        file.
    details : mapping
        Additional entries.
    """

    owner: ProcessIdentity
    created: datetime | None = None
    beaten: datetime | None = None
    token: str = ""
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> str:
        """Return the lease record as JSON."""
        times = {"created": self.created, "beaten": self.beaten}
        return json.dumps(
            {
                **asdict(self.owner),
                **{name: time and time.isoformat() for name, time in times.items()},
                "token": self.token,
                "details": dict(self.details),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str | bytes) -> LeaseRecord:
        """Parse the output of `to_json`.

        Raises
        ------
        ValueError
            If the text is damaged.
        """
        try:
            document = parse_object(text)
            created, beaten = (
                datetime.fromisoformat(document[name]) if document.get(name) else None
                for name in ("created", "beaten")
            )
            if any(moment is not None and moment.tzinfo is None for moment in (created, beaten)):
                raise ValueError("not a lease record: a time has no time zone")
            owner = ProcessIdentity(
                str(document["machine"]),
                int(document["pid"]),
                str(document["started"]),
                str(document.get("host", "")),
            )
            details = dict(document.get("details", {}))
            return LeaseRecord(owner, created, beaten, str(document.get("token", "")), details)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a lease record: {error!r}") from error


def read_lease_record(store: Files, path: str) -> LeaseRecord | None:
    """Return the lease record in a file, or None if it is missing or damaged."""
    try:
        return LeaseRecord.from_json(store.read(path))
    except (StoreError, FileNotFoundError, ValueError):
        return None


def is_abandoned(
    store: Files, path: str, record: LeaseRecord | None, clock: StoreClock | None = None
) -> bool:
    """Return whether the owner of a lease is known to be dead.

    Parameters
    ----------
    store : Files
        The store of the lease record.
    path : str
        The file of the lease record.
    record : LeaseRecord or None
        The record that was read from the file. None counts as not abandoned.
    clock : StoreClock, optional
        Determines the age of the heartbeat. Pass one when checking many leases, because each clock
        queries the store.

    Returns
    -------
    bool
        True at once if the owner ran on this machine and has ended. Also if it is this process and
        no longer holds the lease. True after `STALE_SECONDS` without a heartbeat if the owner runs
        on another machine. False if the age is unknown.
    """
    if record is None:
        return False
    if record.token and record.token in {heartbeat.token for heartbeat in list(_alive)}:
        return False
    if is_here(record.owner):
        return (bool(record.token) and record.owner == this_process()) or is_dead(record.owner)
    age = (clock or StoreClock(store)).age(path, record)
    return age is not None and age > STALE_SECONDS


class StoreClock:
    """Age of heartbeats, by the store's clock if it has one.

    The clock queries the store once, at first use, by writing a probe file and reading its
    modification time. Create a new clock for each round of checks.

    Parameters
    ----------
    store : Files
        The store of the lease records.
    may_write : bool
        If False, no probe is written, and this machine's clock counts as the store's.
    """

    def __init__(self, store: Files, *, may_write: bool = True) -> None:
        self._store = store
        self._has_probed = not may_write
        # Of the store's clock from `time.monotonic`.
        self._offset = None if may_write else time.time() - time.monotonic()

    def age(self, path: str, record: LeaseRecord) -> float | None:
        """Return the seconds since a lease record was last written, or None if unknown."""
        written = self._store.modified(path)
        if written is not None and not self._has_probed:
            self._offset = self._probe(posixpath.dirname(path))
            self._has_probed = True
        if written is not None and self._offset is not None:
            return time.monotonic() + self._offset - written.timestamp()
        return None if record.beaten is None else (_utc() - record.beaten).total_seconds()

    def _probe(self, folder: str) -> float | None:
        path = f"{folder}/.clock-{uuid.uuid4().hex}"
        try:
            self._store.write_text(path, "")
            modified = self._store.modified(path)
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                self._store.delete(path)
        return None if modified is None else modified.timestamp() - time.monotonic()


class Heartbeat:
    """Lease record of this process that a background thread renews.

    Use it as a context manager, or call `start` and `stop`. The thread is a daemon, so it does not
    keep the process alive. It stops at interpreter exit. A forked child has no such thread and does
    not touch the file.

    Parameters
    ----------
    store : Files
        The store of the file.
    path : str
        The file. Its old content is not checked; call `is_abandoned` first.
    details : mapping, optional
        Additional JSON entries of the record.

    Attributes
    ----------
    path : str
        The file.
    token : str
        Distinguishes this record from other records of the same file.
    lost : bool
        True after another process has taken over or deleted the file.
    """

    def __init__(self, store: Files, path: str, details: Mapping[str, Any] | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.lost = False
        self.path = path
        self._store = store
        self._record = LeaseRecord(this_process(), _utc(), _utc(), self.token, dict(details or {}))
        self._lock = threading.Lock()
        self._ending = threading.Event()
        # The thread stops with this object and must not keep it alive.
        weakref.finalize(self, self._ending.set).atexit = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Write the file and start to renew it.

        Raises
        ------
        StoreError, OSError
            If the file cannot be written.
        """
        _alive.add(self)
        self._write()
        threading.Thread(
            target=_beat_on,
            args=(weakref.ref(self), self._ending),
            name="hvd_estimators heartbeat",
            daemon=True,
        ).start()

    def stop(self, *, delete: bool = True) -> None:
        """Stop renewing and delete the file, unless another process owns it by now.

        The call waits for a heartbeat that is being written, so that no write follows.

        Parameters
        ----------
        delete : bool
            Whether to delete the file. If False, the caller must delete it.
        """
        if os.getpid() != self._record.owner.pid:
            return
        self.stop_soon()
        with self._lock:  # unlike acquire and release, safe when interrupted
            if delete:
                self._delete()

    def stop_soon(self) -> None:
        """Stop renewing without waiting. A heartbeat may still be in progress."""
        self._ending.set()
        _alive.discard(self)

    def stop_at_exit(self) -> None:
        """Stop and delete the file, but wait for at most ten seconds."""
        self.stop_soon()
        if os.getpid() == self._record.owner.pid and self._lock.acquire(timeout=_EXIT_SECONDS):
            self._delete()

    def beat(self) -> None:
        """Rewrite the file, unless another process owns it by now; see `lost`."""
        with self._lock:
            if self.lost or self._ending.is_set():
                return
            try:
                if self._is_ours():
                    self._write()
                    return
            except OSError as error:
                # Later heartbeats may succeed.
                logger.warning("The heartbeat %r could not be written (%s).", self.path, error)
                return
            self.lost = True
            logger.warning(
                "This process has lost %r: another process deleted it or took it over. That "
                "happens to a process that is paused for more than %d minutes.",
                self.path,
                STALE_SECONDS // 60,
            )

    def _delete(self) -> None:
        try:
            if self._is_ours():
                self._store.delete(self.path)
        except OSError as error:
            logger.warning("The file %r could not be deleted (%s).", self.path, error)

    def _is_ours(self) -> bool:
        try:
            return LeaseRecord.from_json(self._store.read(self.path)).token == self.token
        except ValueError:
            return False
        except OSError:
            self._store.fs.invalidate_cache()
            if not self._store.exists(self.path):
                return False
            raise

    def _write(self) -> None:
        record = replace(self._record, beaten=_utc())
        self._store.write_text(self.path, record.to_json())


_alive: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _beat_on(beating: weakref.ref[Heartbeat], ending: threading.Event) -> None:
    while not ending.wait(HEARTBEAT_SECONDS):
        heartbeat = beating()
        if heartbeat is None or heartbeat.lost:
            return
        try:
            heartbeat.beat()
        except Exception as error:
            logger.warning("A heartbeat failed: %r", error)
        del heartbeat


def _stop_all() -> None:
    for heartbeat in list(_alive):
        with contextlib.suppress(Exception):
            heartbeat.stop_at_exit()


at_exit(_stop_all)


def _utc() -> datetime:
    return datetime.now(UTC)


def lease_path(run_path: str) -> str:
    """Return the path of a run's lease."""
    return f"{run_path}/lease.json"


def holder(store: Files, run_path: str, clock: StoreClock | None = None) -> LeaseRecord | None:
    """Return the lease record of a run's live owner, or None if the lease is free."""
    path = lease_path(run_path)
    content = store.read_if_exists(path)
    if content is None:
        return None
    try:
        record = LeaseRecord.from_json(content)
    except ValueError:
        record = LeaseRecord(ProcessIdentity("", 0, ""))  # only its age counts
    return None if is_abandoned(store, path, record, clock) else record


class Lease(Heartbeat):
    """Context manager that holds a run's lease.

    Parameters
    ----------
    store : Files
        The store of the run.
    run : RunPaths
        The run.
    patient : bool
        Whether to wait if the current owner may be dead, see `require_free`.
    """

    def __init__(self, store: Files, run: RunPaths, *, patient: bool = False) -> None:
        super().__init__(store, lease_path(run.run_path), {"run_id": run.run_id})
        self._run = run
        self._is_patient = patient
        self._certain_at: float | None = None

    def start(self) -> None:
        """Take the lease and start to renew it.

        Raises
        ------
        ParamError
            If another process or fit holds the lease.
        """
        # Otherwise other threads of this process would consider the new lease abandoned.
        _alive.add(self)
        try:
            text = self._record.to_json()
            if not (self._store.creates_exclusively and self._store.write_new(self.path, text)):
                self.require_free()
                self._certain_at = time.monotonic() + SETTLE_SECONDS
            super().start()
        except BaseException:
            self.stop()
            raise

    def require_free(self) -> None:
        """Check that the lease is free; a patient lease waits if the owner may be dead.

        An owner that was killed on another machine counts as dead `STALE_SECONDS` after its last
        heartbeat. A live owner reveals itself by its next heartbeat, within half a minute.

        Raises
        ------
        ParamError
            If the lease is held. The message names the owner and the start time.
        """
        first = record = holder(self._store, self._run.run_path)
        deadline = time.monotonic() + STALE_SECONDS + 2 * HEARTBEAT_SECONDS
        while record is not None and first is not None:
            has_beaten = (record.token, record.beaten) != (first.token, first.beaten)
            is_certain = has_beaten or is_here(record.owner) or time.monotonic() > deadline
            if is_certain or not self._is_patient:
                raise _held_error(self._run, record)
            if record is first:
                logger.warning(
                    "run_id: %r was being trained by %s. Waiting for a heartbeat of that process: "
                    "without one, the run is free after %g minutes.",
                    *(self._run.run_id, record.owner, STALE_SECONDS / 60),
                )
            time.sleep(_POLL_SECONDS)
            record = holder(self._store, self._run.run_path)

    def note_launch(self, number: int) -> None:
        """Record the launch number, so that ranks of earlier launches stop writing to the run.

        Does nothing if another process owns the lease by now.

        Raises
        ------
        StoreError, OSError
            If the lease cannot be written.
        """
        with self._lock:
            if not self.lost and self._is_ours():
                details = {**self._record.details, LAUNCH: number}
                self._record = replace(self._record, details=details)
                self._write()

    def confirm(self) -> None:
        """Check that no other process took the lease at the same time; may wait for a second.

        Call it before anything is written to the run's folder.

        Raises
        ------
        ParamError
            If another process holds the lease.
        """
        if self._certain_at is None:
            return
        time.sleep(max(self._certain_at - time.monotonic(), 0))
        self._certain_at = None
        record = read_lease_record(self._store, self.path)
        if record is not None and record.token != self.token:
            self.stop()
            raise _held_error(self._run, record)


def _held_error(run: RunPaths, record: LeaseRecord) -> ParamError:
    since = "" if record.created is None else f" since {record.created:%Y-%m-%d %H:%M:%S} UTC"
    if record.owner == this_process():
        return ParamError(
            f"run_id: {run.run_id!r} is being trained by another fit of this application{since}, "
            "which writes the same checkpoints. Set another run_id, or none."
        )
    beaten = "" if record.beaten is None else f" (last heartbeat {record.beaten:%H:%M:%S} UTC)"
    return ParamError(
        f"run_id: {run.run_id!r} is being trained by {record.owner}{since}{beaten}, which writes "
        "the same checkpoints. Set another run_id, or none, or wait until that fit has ended. If "
        f"that process has died, this run is free {STALE_SECONDS / 60:g} minutes after its last "
        f"heartbeat, or as soon as {lease_path(run.run_path)!r} is deleted."
    )


@dataclass(frozen=True)
class FencingToken:
    """Check whether a launch is still the one that trains a run.

    Attributes
    ----------
    path : str
        The run's lease file.
    token : str
        Token of the lease when the launch started.
    launch : int
        Number of the launch under this lease, from 0.
    """

    path: str
    token: str
    launch: int

    def check(self, store: Files) -> None:
        """Check that no other launch or application has replaced this launch.

        Without a lease, no process trains the run, and the driver is about to end as well.

        Raises
        ------
        StoreError
            If the launch was replaced, or if the store cannot be read.
        """
        content = store.read_if_exists(self.path)
        if content is None:
            return
        try:
            record = LeaseRecord.from_json(content)
        except ValueError:
            return  # a process that damages the file is not training
        if record.token != self.token:
            raise StoreError(
                f"{record.owner} has taken the run over from this fit (see {self.path!r}), which "
                "no longer writes to it"
            )
        if record.details.get(LAUNCH, 0) != self.launch:
            raise StoreError(
                "the ranks have been launched again in place of this rank, which was slow to end "
                f"(see {self.path!r})"
            )
