"""Which process a thing in a store belongs to, and whether that process still lives.

Runs on the driver. A small file, the claim, names the process (`Owner`), and a `Heartbeat` writes
it anew every `HEARTBEAT_SECONDS`. Other processes judge by it whether the owner is gone:

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

from hvd_estimators.exceptions import StoreError
from hvd_estimators.owners import Owner, is_dead, is_here, this_process
from hvd_estimators.store.exiting import at_exit
from hvd_estimators.store.files import Files

__all__ = [
    "HEARTBEAT_SECONDS",
    "STALE_SECONDS",
    "Claim",
    "Heartbeat",
    "StoreClock",
    "is_abandoned",
    "read_claim",
]

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 30.0
"""How often a claim is written anew."""

STALE_SECONDS = 300.0
"""Age of the last heartbeat from which on an owner on another machine counts as gone."""

_EXIT_SECONDS = 10.0
"""How long the end of the interpreter waits for a heartbeat that is on its way."""


@dataclass(frozen=True)
class Claim:
    """What a file tells about the process that something belongs to.

    Attributes
    ----------
    owner : Owner
        The process.
    created, beaten : datetime.datetime or None
        When it claimed the thing, and its last heartbeat, by its own clock, in UTC.
    token : str
        Tells this claim from the owner's other ones, earlier ones of the same file included.
    details : mapping
        Whatever else was noted.
    """

    owner: Owner
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
    def from_json(text: str | bytes) -> Claim:
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
            owner = Owner(
                str(document["machine"]),
                int(document["pid"]),
                str(document["started"]),
                str(document.get("host", "")),
            )
            details = dict(document.get("details", {}))
            return Claim(owner, created, beaten, str(document.get("token", "")), details)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a claim: {error!r}") from error


def read_claim(store: Files, path: str) -> Claim | None:
    """Return what a file tells about its owner; None if it is missing or damaged."""
    try:
        return Claim.from_json(store.read(path))
    except (StoreError, FileNotFoundError, ValueError):
        return None


def is_abandoned(
    store: Files, path: str, claim: Claim | None, clock: StoreClock | None = None
) -> bool:
    """Return whether the owner of a claim is gone, as far as that can be told.

    Parameters
    ----------
    store : Files
        Where the claim lies.
    path : str
        Its file.
    claim : Claim or None
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

    def age(self, path: str, claim: Claim) -> float | None:
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
        self._claim = Claim(this_process(), _utc(), _utc(), self.token, dict(details or {}))
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
            return Claim.from_json(self._store.read(self._path)).token == self.token
        except ValueError:
            return False
        except OSError:
            self._store.fs.invalidate_cache()
            if not self._store.exists(self._path):
                return False
            raise

    def _write(self) -> None:
        claim = Claim(
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
