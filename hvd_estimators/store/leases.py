"""Leases of runs and datasets: one owner at a time, on all hosts.

Runs on the driver. A small file, the lease record, names the process (`ProcessIdentity`). A
`Heartbeat` writes it again every `HEARTBEAT_SECONDS`. Other processes judge by it whether the owner
is gone:

- On the owner's machine the operating system tells. A process that is stopped, or whose machine was
  asleep, is alive there, however long ago its last heartbeat is.
- From another machine, the owner counts as gone when its last heartbeat is older than
  `STALE_SECONDS`. So one that is paused for longer than that is taken for dead. It notices when it
  goes on, because it looks whether the claim is still its own before it writes it
  (`Heartbeat.lost`).

The age of a heartbeat is told by the store's clock alone, where it notes when a file was written:
the file's time against that of a file which is written to ask. Elsewhere the owner's clock is
compared with the reader's (both UTC): a reader whose clock is fast by some minutes takes the owner
for dead that much too early, and one whose clock is slow that much too late. That does no harm
below `STALE_SECONDS` less two heartbeats, four minutes.

Runs on the driver. ``runs/<run_id>/lease.json`` names the process that holds the lease; see
`hvd_estimators.store.leases` for when a holder counts as gone. What is guaranteed:

- Where a store creates files exclusively (`Store.creates_exclusively`), of several processes that
  take a free lease exactly one gets it.
- Elsewhere, and where a lease is taken over from a holder that is gone, each process writes the
  file, lets `SETTLE_SECONDS` pass, and reads it again: who wrote last has it. Two of them may both
  believe to have it only where a write took longer than that to be seen.
- A holder that was taken for gone (its machine was asleep for minutes, or did not reach the store)
  finds out when it next writes its heartbeat, and says so. Its ranks find out before they next
  write a checkpoint, see `hvd_estimators.store.leases`.

A rank outlives its launch by some seconds where it may save the step that it is in, and by more
where its machine is cut off or its process was stopped. Meanwhile its driver may have launched
others, or another application may have taken the run over. Both are seen by the run's lease: it
has another token then, or tells of a later launch.
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
from datetime import datetime, timezone
from types import MappingProxyType, TracebackType
from typing import Any

from typing_extensions import Self

from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, is_here, this_process
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.exit_hooks import at_exit
from hvd_estimators.store.files import Files
from hvd_estimators.store.paths import RunPaths

__all__ = [
    "HEARTBEAT_SECONDS",
    "LAUNCH",
    "SETTLE_SECONDS",
    "STALE_SECONDS",
    "FencingToken",
    "Heartbeat",
    "Lease",
    "LeaseRecord",
    "StoreClock",
    "await_free",
    "holder",
    "is_abandoned",
    "lease_path",
    "read_if_there",
    "read_lease_record",
    "require_free",
]

logger = logging.getLogger(__name__)


HEARTBEAT_SECONDS = 30.0


"""How often a claim is written anew."""


STALE_SECONDS = 300.0


"""Age of the last heartbeat from which on an owner on another machine counts as gone."""


_EXIT_SECONDS = 10.0


"""How long the end of the interpreter waits for a heartbeat that is on its way."""


@dataclass(frozen=True)
class LeaseRecord:
    """What a file tells about the process that something belongs to.

    Attributes
    ----------
    owner : ProcessIdentity
        The process.
    created, beaten : datetime.datetime or None
        When it claimed the thing, and its last heartbeat, by its own clock, in UTC.
    token : str
        Tells this claim from the owner's other ones, earlier ones of the same file included.
    details : mapping
        Whatever else was noted.
    """

    owner: ProcessIdentity
    created: datetime | None = None
    beaten: datetime | None = None
    token: str = ""
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def to_json(self) -> str:
        """Return the claim as a JSON document."""
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
        """Read back what `to_json` wrote.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        try:
            document = json.loads(text)
            created, beaten = (
                datetime.fromisoformat(document[name]) if document.get(name) else None
                for name in ("created", "beaten")
            )
            owner = ProcessIdentity(
                str(document["machine"]),
                int(document["pid"]),
                str(document["started"]),
                str(document.get("host", "")),
            )
            details = dict(document.get("details", {}))
            return LeaseRecord(owner, created, beaten, str(document.get("token", "")), details)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a claim: {error!r}") from error


def read_lease_record(store: Files, path: str) -> LeaseRecord | None:
    """Return what a file tells about its owner; None if it is missing or damaged."""
    try:
        return LeaseRecord.from_json(store.read(path))
    except (StoreError, FileNotFoundError, ValueError):
        return None


def is_abandoned(
    store: Files, path: str, claim: LeaseRecord | None, clock: StoreClock | None = None
) -> bool:
    """Return whether the owner of a claim is gone, as far as that can be told.

    Parameters
    ----------
    store : Files
        Where the claim lies.
    path : str
        Its file.
    claim : LeaseRecord or None
        What was read there. Of None nothing is known: not abandoned.
    clock : StoreClock, optional
        Tells the age of the heartbeat. Pass one for many claims, as it asks the store the time.

    Returns
    -------
    bool
        True at once if the owner ran on this machine and has ended, or if it is this process, which
        holds the claim no longer. True after `STALE_SECONDS` without a heartbeat if it runs on
        another machine. False where the age is not known.
    """
    if claim is None:
        return False
    if claim.token and claim.token in {heartbeat.token for heartbeat in list(_alive)}:
        return False
    if is_here(claim.owner):
        return (bool(claim.token) and claim.owner == this_process()) or is_dead(claim.owner)
    age = (clock or StoreClock(store)).age(path, claim)
    return age is not None and age > STALE_SECONDS


class StoreClock:
    """Tells how old heartbeats are, by the store's clock where it has one.

    It asks the store once, when it is first needed, by writing a file and looking at its time. So
    make a new one for each round of looking.
    """

    def __init__(self, store: Files) -> None:
        self._store = store
        self._asked: tuple[datetime | None, float] | None = None

    def age(self, path: str, claim: LeaseRecord) -> float | None:
        """Return the seconds since a claim was last written; None if that is not known."""
        written = self._store.modified(path)
        now = self._now(posixpath.dirname(path)) if written else None
        if written is not None and now is not None:
            return (now - written).total_seconds()
        if claim.beaten is None:
            return None
        return (_utc() - claim.beaten).total_seconds()

    def _now(self, folder: str) -> datetime | None:
        if self._asked is None:
            probe = f"{folder}/.clock-{uuid.uuid4().hex}"
            try:
                self._store.write_text(probe, "")
                told = self._store.modified(probe)
            except OSError:
                told = None
            finally:
                with contextlib.suppress(OSError):
                    self._store.delete(probe)
            self._asked = told, time.monotonic()
        told, asked = self._asked
        return told and datetime.fromtimestamp(
            told.timestamp() + time.monotonic() - asked, timezone.utc
        )


class Heartbeat:
    """Claims something in a store for this process, and keeps the claim fresh from a thread.

    A context manager; `start` and `stop` are for those who need the steps. The thread is a daemon,
    so that it keeps no process alive, and it is stopped when the interpreter exits. A forked child
    has no such thread, and leaves the file alone.

    Parameters
    ----------
    store : Files
        Where the file is written.
    path : str
        The file. What it says is not looked at when it is claimed: ask `is_abandoned` before.
    details : mapping, optional
        What else the file is to tell, as JSON.
    """

    def __init__(self, store: Files, path: str, details: Mapping[str, Any] | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.lost = False
        """Whether somebody else has claimed the file, or deleted it, in the meantime."""
        self._store = store
        self._path = path
        self._claim = LeaseRecord(this_process(), _utc(), _utc(), self.token, dict(details or {}))
        self._lock = threading.Lock()
        self._ending = threading.Event()
        # The thread ends with it, and does not keep it alive.
        weakref.finalize(self, self._ending.set).atexit = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def announce(self) -> None:
        """Count as alive from now on, where the file is written before `start`."""
        _alive.add(self)

    def start(self) -> None:
        """Write the file, and begin to renew it.

        Raises
        ------
        StoreError, OSError
            If it cannot be written.
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
        """Stop renewing, and delete the file unless it belongs to somebody else by now.

        A heartbeat that is on its way is waited for, so that nobody writes the file afterwards.

        Parameters
        ----------
        delete : bool
            Whether to delete the file; otherwise the caller does.
        """
        if os.getpid() != self._claim.owner.pid:
            return
        self._ending.set()
        _alive.discard(self)
        with self._lock:
            if delete:
                self._delete()

    def stop_soon(self) -> None:
        """Stop renewing, but wait for nothing; a heartbeat may still be on its way."""
        self._ending.set()
        _alive.discard(self)

    def stop_at_exit(self) -> None:
        """Stop and delete the file, but wait for ten seconds at most."""
        self._ending.set()
        if os.getpid() == self._claim.owner.pid and self._lock.acquire(timeout=_EXIT_SECONDS):
            self._delete()

    def beat(self) -> None:
        """Write the file anew, unless it is somebody else's by now; see `lost`."""
        with self._lock:
            if self.lost or self._ending.is_set():
                return
            try:
                if self._is_ours():
                    self._write()
                    return
            except OSError as error:
                # Later ones may get through.
                logger.warning("The heartbeat %r could not be written (%s).", self._path, error)
                return
            self.lost = True
            logger.warning(
                "%r is no longer this process's: it was deleted, or taken by another process. That "
                "happens to a process that is paused for more than %d minutes.",
                self._path,
                STALE_SECONDS // 60,
            )

    def note(self, **details: Any) -> None:
        """Write more details at once, unless the file is somebody else's by now; see `lost`.

        Raises
        ------
        StoreError, OSError
            If they cannot be written.
        """
        with self._lock:
            if self.lost or not self._is_ours():
                return
            self._claim = replace(self._claim, details={**self._claim.details, **details})
            self._write()

    def _delete(self) -> None:
        try:
            if self._is_ours():
                self._store.delete(self._path)
        except OSError as error:
            logger.warning("The file %r could not be deleted (%s).", self._path, error)

    def _is_ours(self) -> bool:
        try:
            return LeaseRecord.from_json(self._store.read(self._path)).token == self.token
        except ValueError:
            return False
        except OSError:
            self._store.fs.invalidate_cache()
            if not self._store.exists(self._path):
                return False
            raise

    def _write(self) -> None:
        claim = LeaseRecord(
            self._claim.owner, self._claim.created, _utc(), self.token, self._claim.details
        )
        self._store.write_text(self._path, claim.to_json())


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
        _alive.discard(heartbeat)
        with contextlib.suppress(Exception):
            heartbeat.stop_at_exit()


at_exit(_stop_all)


def _utc() -> datetime:
    return datetime.now(timezone.utc)


_POLL_SECONDS = 5.0


LAUNCH = "launch"


"""Detail of a lease: which launch of ranks its holder has come to, if not the first."""


SETTLE_SECONDS = 1.0


"""Time in which a file that was written is seen by all."""


def lease_path(run_path: str) -> str:
    """Return the path of a run's lease."""
    return f"{run_path}/lease.json"


def holder(store: Files, run_path: str) -> LeaseRecord | None:
    """Return who holds a run's lease; None where nobody does, or the holder is gone."""
    path = lease_path(run_path)
    content = read_if_there(store, path)
    if content is None:
        return None
    try:
        claim = LeaseRecord.from_json(content)
    except ValueError:
        claim = LeaseRecord(ProcessIdentity("", 0, ""))  # its age alone tells
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


class Lease:
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
        claim = LeaseRecord(this_process(), now, now, self._heartbeat.token)
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
        claim = read_lease_record(self._store, self._path)
        if claim is not None and claim.token != self._heartbeat.token:
            self._heartbeat.stop()
            raise _refused(self._run, claim)


def _refused(run: RunPaths, held: LeaseRecord) -> ParamError:
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


@dataclass(frozen=True)
class FencingToken:
    """Tells whether a launch is still the one that trains a run.

    Attributes
    ----------
    path : str
        The run's lease.
    token : str
        The lease's when the launch began.
    launch : int
        The launch's number under this lease, from 0.
    """

    path: str
    token: str
    launch: int

    def check(self, store: Files) -> None:
        """Make sure that nobody has come in this launch's place.

        Where there is no lease, nobody trains the run, and the driver is about to end as well.

        Raises
        ------
        StoreError
            If somebody has; or if the store does not tell.
        """
        content = read_if_there(store, self.path)
        if content is None:
            return
        try:
            claim = LeaseRecord.from_json(content)
        except ValueError:
            return  # whoever damaged it has not trained
        if claim.token != self.token:
            raise StoreError(
                f"{claim.owner} has taken the run over from this fit (see {self.path!r}), which "
                "writes to it no more"
            )
        if claim.details.get(LAUNCH, 0) != self.launch:
            raise StoreError(
                "the ranks have been launched again in place of this one, which was slow to end"
            )
