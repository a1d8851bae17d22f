"""Leases of runs and datasets: at most one owner at a time, across all hosts.

The owners of a run are numbered. Generation n is the file ``runs/<run_id>/lease-<n>.json``. Each
file is created exclusively (`Files.write_new`), so exactly one of several processes gets a number,
however late their writes arrive. The greatest generation names the run's owner, or says that the
run is free. Each change creates the next generation:

- A process takes a run that is free, or whose owner is dead.
- The owner relaunches the ranks. Ranks of the earlier launch find a greater generation.
- The owner releases the run.

Numbers are not used again while a run exists, so a generation is a fencing token: a process that
finds a greater one must not write to the run. Smaller generations are deleted. A write of one may
arrive late without effect.

Only the owner rewrites its file, every `HEARTBEAT_SECONDS`. Other processes use these heartbeats to
decide if the owner is dead:

- On the owner's machine, the operating system decides. A process that is stopped, or whose machine
  was asleep, counts as alive there, whatever the age of its last heartbeat.
- On another machine, the owner counts as dead if its last heartbeat is older than `STALE_SECONDS`.
  A process that was paused for longer therefore counts as dead. It finds this when it resumes,
  because it looks for a greater generation before each heartbeat (`Heartbeat.lost`). Its ranks do
  so before they write their next checkpoint (`FencingToken`).

If the store records modification times, only the store's clock determines the age of a heartbeat.
The age is then the difference between the times of the file and of a probe file written now.
Otherwise the owner's clock is compared with the reader's clock (both UTC). A reader whose clock is
fast then considers the owner dead too early by the difference. `Store.list_runs`, which writes
nothing, compares the file's time with its own clock.

A dataset has one owner, so its lease is a file with heartbeats and without numbers.

Leases are taken on the driver; ranks check their `FencingToken`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import posixpath
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Self

from hvd_estimators._util.documents import parse_object
from hvd_estimators._util.process_identity import ProcessIdentity, is_dead, is_here, this_process
from hvd_estimators.exceptions import ParamError, StoreError
from hvd_estimators.store.files import Files
from hvd_estimators.store.paths import RunPaths
from hvd_estimators.store.retries import at_exit, is_awaited

logger = logging.getLogger(__name__)


HEARTBEAT_SECONDS = 30.0
"""Interval at which the owner rewrites a lease record."""

STALE_SECONDS = 300.0
"""Age of the last heartbeat above which an owner on another machine counts as dead."""

_EXIT_SECONDS = 10.0
"""Maximum wait at interpreter exit for a heartbeat that is being written."""

_POLL_SECONDS = 5.0

_MOST_TRIES = 100

_GENERATION = re.compile(r"lease-(\d+)\.json")


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
        Distinguishes this lease from all others; the same in all its generations.
    is_released : bool
        Whether the owner has ended, so that the run is free.
    """

    owner: ProcessIdentity
    created: datetime | None = None
    beaten: datetime | None = None
    token: str = ""
    is_released: bool = False

    def to_json(self) -> str:
        """Return the lease record as JSON."""
        document = {**asdict(self.owner), **vars(self)}
        del document["owner"]
        return json.dumps(document, indent=1, default=datetime.isoformat)

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
            is_released = document.get("is_released") is True
            return LeaseRecord(owner, created, beaten, str(document.get("token", "")), is_released)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a lease record: {error!r}") from error


UNREADABLE = LeaseRecord(ProcessIdentity("", 0, ""))
"""Stands for a damaged record. Its owner is unknown, so only its age counts."""


def read_lease_record(store: Files, path: str) -> LeaseRecord | None:
    """Return the lease record in a file, `UNREADABLE` if damaged, or None if there is no file.

    Raises
    ------
    StoreError
        If the file cannot be read.
    """
    content = store.read_if_exists(path)
    if content is None:
        return None
    try:
        return LeaseRecord.from_json(content)
    except ValueError:
        return UNREADABLE


Clock = Callable[[], "datetime | None"]
"""Returns the time by a store's clock; None if the store has none."""


def is_abandoned(store: Files, path: str, record: LeaseRecord, clock: Clock | None = None) -> bool:
    """Return whether the owner of a lease is known to be dead.

    Parameters
    ----------
    store : Files
        The store of the lease record.
    path : str
        The file of the lease record.
    record : LeaseRecord
        The record that was read from the file.
    clock : callable, optional
        Returns the time by the store's clock. Default: `store_time`, which writes a file.

    Returns
    -------
    bool
        True at once if the owner ran on this machine and has ended. Also if it is this process and
        no longer holds the lease. True after `STALE_SECONDS` without a heartbeat if the owner runs
        on another machine. False if the age is unknown.
    """
    if record.token in _alive:
        return False
    if is_here(record.owner):
        return (bool(record.token) and record.owner == this_process()) or is_dead(record.owner)
    age = _age(store, path, record, clock)
    return age is not None and age > STALE_SECONDS


def _age(store: Files, path: str, record: LeaseRecord, clock: Clock | None) -> float | None:
    """Return the seconds since a lease record was last written, or None if unknown."""
    written = store.modified(path)
    if written is None:
        return None if record.beaten is None else (utc_now() - record.beaten).total_seconds()
    now = store_time(store, posixpath.dirname(path)) if clock is None else clock()
    return ((now or utc_now()) - written).total_seconds()


def store_time(store: Files, folder: str) -> datetime | None:
    """Return the time by the store's clock, from a file that is written now."""
    path = f"{folder}/.clock-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        try:
            store.write_text(path, "")
            return store.modified(path)
        finally:
            store.delete(path)
    return None


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

    Attributes
    ----------
    path : str
        The file.
    token : str
        Distinguishes this record from other records of the same file.
    lost : bool
        True after another process has taken over or deleted the file.
    """

    def __init__(self, store: Files, path: str) -> None:
        self.token = uuid.uuid4().hex
        self.lost = False
        self.path = path
        self._store = store
        self._record = LeaseRecord(this_process(), utc_now(), utc_now(), self.token)
        self._thread: threading.Thread | None = None
        self._user = threading.current_thread()
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
        # Otherwise other threads of this process would consider the new lease abandoned.
        _alive[self.token] = self
        self._claim()
        self._thread = threading.Thread(
            target=_beat_on,
            args=(weakref.ref(self), self._ending),
            name="hvd_estimators heartbeat",
            daemon=True,
        )
        self._thread.start()

    def stop(self, *, delete: bool = True, seconds: float | None = None) -> None:
        """Stop renewing and delete the file, unless another process owns it by now.

        The call waits for a heartbeat that is being written, so that no write follows.

        Parameters
        ----------
        delete : bool
            Whether to delete the file. If False, the caller must delete it.
        seconds : float, optional
            Maximum wait. The file stays if a heartbeat takes longer. Default: unlimited.
        """
        if os.getpid() != self._record.owner.pid:
            return
        self._ending.set()
        _alive.pop(self.token, None)
        # An interrupt leaves no lock, unlike one while a lock is taken.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(seconds)
        if delete and (self._thread is None or not self._thread.is_alive()):
            try:
                self._release()
            except OSError as error:
                logger.warning("The file %r could not be deleted (%s).", self.path, error)

    @property
    def has_awaited_user(self) -> bool:
        """True if it was made by a thread for which Python waits before it exits."""
        return is_awaited(self._user)

    @property
    def is_beating(self) -> bool:
        """True from the start to the end."""
        return self.token in _alive

    def beat(self) -> None:
        """Rewrite the file, unless another process owns it by now; see `lost`."""
        if self.lost or self._ending.is_set():
            return
        try:
            if self._is_ours():
                self._write()
            else:
                self._lose()
        except OSError as error:
            # Later heartbeats may succeed.
            logger.warning("The heartbeat %r could not be written (%s).", self.path, error)

    def _lose(self) -> None:
        self.lost = True
        logger.warning(
            "This process has lost %r: another process deleted it or took it over. That happens to "
            "a process that is paused for more than %d minutes.",
            self.path,
            STALE_SECONDS // 60,
        )

    def _claim(self) -> None:
        self._write()

    def _is_ours(self) -> bool:
        record = read_lease_record(self._store, self.path)
        return record is not None and record.token == self.token

    def _release(self) -> None:
        if self._is_ours():
            self._store.delete(self.path)

    def _write(self) -> None:
        self._store.write_text(self.path, replace(self._record, beaten=utc_now()).to_json())


_alive: weakref.WeakValueDictionary[str, Heartbeat] = weakref.WeakValueDictionary()
"""Heartbeats of this process by token."""


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


def _stop_all(is_last: bool) -> None:
    for reference in _alive.valuerefs():
        heartbeat = reference()
        if heartbeat is not None and (is_last or not heartbeat.has_awaited_user):
            with contextlib.suppress(Exception):
                heartbeat.stop(seconds=_EXIT_SECONDS)


at_exit(_stop_all)


def utc_now() -> datetime:
    """Return the time by this machine's clock."""
    return datetime.now(UTC)


def lease_path(run_path: str, generation: int) -> str:
    """Return the path of a generation of a run's lease."""
    return f"{run_path}/lease-{generation:06d}.json"


def newest_lease(store: Files, run_path: str) -> tuple[int, LeaseRecord | None]:
    """Return the greatest generation of a run's lease and its record; 0 and None if none exists.

    Raises
    ------
    StoreError
        If the storage cannot be queried.
    """
    generation, is_new = 0, True
    while is_new:
        newest = max(_generations(store.names(run_path)), default=0)
        record = read_lease_record(store, lease_path(run_path, newest)) if newest else None
        if record is not None or not newest:
            return newest, record
        # A still greater generation has replaced it meanwhile.
        generation, is_new = newest, newest != generation
    return generation, UNREADABLE


def _generations(names: Collection[str]) -> list[int]:
    return [int(match[1]) for match in map(_GENERATION.fullmatch, names) if match]


def holder(
    store: Files, run_path: str, clock: Clock | None = None
) -> tuple[int, LeaseRecord | None]:
    """Return a run's greatest generation and the record of its live owner; None if it is free.

    See `is_abandoned` for ``clock``.
    """
    generation, record = newest_lease(store, run_path)
    if record is None or record.is_released:
        return generation, None
    path = lease_path(run_path, generation)
    return generation, None if is_abandoned(store, path, record, clock) else record


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

    Attributes
    ----------
    generation : int
        Number of this lease, and of its newest launch; 0 before the start.
    """

    def __init__(self, store: Files, run: RunPaths, *, patient: bool = False) -> None:
        super().__init__(store, lease_path(run.run_path, 0))
        self.generation = 0
        self._run = run
        self._is_patient = patient

    def start(self) -> None:
        """Take the lease and start to renew it.

        Raises
        ------
        ParamError
            If another process or fit holds the lease.
        """
        try:
            super().start()
        except BaseException:
            self.stop()
            raise

    def require_free(self) -> int:
        """Check that the run is free; a patient lease waits if the owner may be dead.

        An owner that was killed on another machine counts as dead `STALE_SECONDS` after its last
        heartbeat. A live owner reveals itself by its next heartbeat, within half a minute.

        Returns
        -------
        int
            The run's greatest generation, whose owner is dead or has released it.

        Raises
        ------
        ParamError
            If the lease is held. The message names the owner and the start time.
        """
        generation, record = holder(self._store, self._run.run_path)
        first = record
        deadline = time.monotonic() + STALE_SECONDS + 2 * HEARTBEAT_SECONDS
        while record is not None and first is not None:
            has_beaten = (record.token, record.beaten) != (first.token, first.beaten)
            is_certain = has_beaten or is_here(record.owner) or time.monotonic() > deadline
            if is_certain or not self._is_patient:
                raise self._held_error(generation, record)
            if record is first:
                logger.warning(
                    "run_id: %r was being trained by %s. Waiting for a heartbeat of that process: "
                    "without one, the run is free after %g minutes.",
                    *(self._run.run_id, record.owner, STALE_SECONDS / 60),
                )
            time.sleep(_POLL_SECONDS)
            generation, record = holder(self._store, self._run.run_path)
        return generation

    def advance(self) -> None:
        """Take the next generation, so that ranks of earlier launches stop writing to the run.

        Does nothing if another process owns the lease by now. The ranks will find out.

        Raises
        ------
        StoreError, OSError
            If the lease cannot be written.
        """
        newest = self._own_generation()
        if not (newest and self._take(newest + 1)) and not self.lost:
            self._lose()

    def _claim(self) -> None:
        for _ in range(_MOST_TRIES):
            newest = self.require_free()
            if self._take(newest + 1):
                return
            # Another process has taken it, and may be alive.
        raise StoreError(
            f"run_id: the lease of {self._run.run_id!r} cannot be taken. The store has "
            f"{lease_path(self._run.run_path, newest + 1)!r}, and does not list it. Set a store "
            "whose listings are up to date."
        )

    def _take(self, generation: int) -> bool:
        """Create a generation, and return whether it is the greatest."""
        if not self._create(generation):
            return False
        # If the file was created late, greater ones may exist, and this one may have been deleted.
        generations = _generations(self._store.names(self._run.run_path))
        if max(generations, default=0) != generation:
            return False
        self.generation, self.path = generation, lease_path(self._run.run_path, generation)
        self._forget(generations, below=generation)
        return True

    def _create(self, generation: int, is_released: bool = False) -> bool:
        record = replace(self._record, beaten=utc_now(), is_released=is_released)
        return self._store.write_new(lease_path(self._run.run_path, generation), record.to_json())

    def _forget(self, generations: Collection[int], below: int) -> None:
        for generation in sorted(generations):
            if generation < below:
                with contextlib.suppress(OSError):  # the next owner deletes it
                    self._store.delete(lease_path(self._run.run_path, generation))

    def _is_ours(self) -> bool:
        return self._own_generation() > 0

    def _own_generation(self) -> int:
        """Return the greatest generation if it is this lease's, otherwise 0."""
        generation, record = newest_lease(self._store, self._run.run_path)
        is_ours = record is not None and record.token == self.token and not record.is_released
        return generation if is_ours else 0

    def _release(self) -> None:
        """Create a free generation, or delete the lease of a run that has no other files."""
        newest = self._own_generation()
        if newest:
            names = [name for name in self._store.names(self._run.run_path) if name[0] != "."]
            generations = _generations(names)
            if len(generations) == len(names) or self._create(newest + 1, is_released=True):
                self._forget(generations, below=newest + 1)

    def _held_error(self, generation: int, record: LeaseRecord) -> ParamError:
        since = "" if record.created is None else f" since {record.created:%Y-%m-%d %H:%M:%S} UTC"
        held = f"run_id: {self._run.run_id!r} is being trained by"
        if record.owner == this_process():
            return ParamError(
                f"{held} another fit of this application{since}, which writes the same "
                "checkpoints. Set another run_id, or none."
            )
        beaten = "" if record.beaten is None else f" (last heartbeat {record.beaten:%H:%M:%S} UTC)"
        return ParamError(
            f"{held} {record.owner}{since}{beaten}, which writes the same checkpoints. Set another "
            "run_id, or none, or wait until that fit has ended. If that process has died, this run "
            f"is free {STALE_SECONDS / 60:g} minutes after its last heartbeat, or as soon as "
            f"{lease_path(self._run.run_path, generation)!r} is deleted."
        )


@dataclass(frozen=True)
class FencingToken:
    """Check whether a launch is still the one that trains a run.

    Attributes
    ----------
    run_path : str
        Folder of the run.
    generation : int
        Generation of the run's lease when the launch started.
    token : str
        Token of the lease.
    """

    run_path: str
    generation: int
    token: str

    def check(self, store: Files) -> None:
        """Check that no other launch or application has replaced this launch.

        Without an owner, no process trains the run, and the driver is about to end as well.

        Raises
        ------
        StoreError
            If the launch was replaced, or if the store cannot be read.
        """
        newest, record = newest_lease(store, self.run_path)
        if record is None:
            return
        # The driver may have just released the run. A process that damages a file does not train.
        launch = newest - 1 if record.is_released else newest
        if launch == self.generation and record.token in (self.token, ""):
            return
        by = f"{record.owner} has taken the run over from this fit, which no longer writes to it"
        if record.token == self.token:
            by = "the ranks have been launched again in place of this rank, which was slow to end"
        raise StoreError(f"{by} (see {lease_path(self.run_path, newest)!r})")
