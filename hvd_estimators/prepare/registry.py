"""The prepared datasets of this application: what is shared, in use, or to be deleted.

Runs on the driver.
"""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hvd_estimators.exceptions import StoreError
from hvd_estimators.owners import Owner
from hvd_estimators.prepare.catalog import (
    dataset_paths,
    hold_paths,
    is_whole,
    manifest_path,
    new_hold_path,
    owner_path,
    split_path,
    stored_indices,
)
from hvd_estimators.prepare.lineage import SourcePlan
from hvd_estimators.store import Store
from hvd_estimators.store.claims import Claim, Heartbeat, StoreClock, is_abandoned, read_claim

__all__ = ["KEPT_DATASETS", "Loan", "Registry", "delete_orphans"]

logger = logging.getLogger(__name__)

KEPT_DATASETS = 3
"""Datasets that are kept while nothing uses them: those that were used last."""

_LOOK_AGAIN_SECONDS = 1.0
"""How often waiting threads check whether the writer is still alive."""


@dataclass(eq=False)
class Entry:
    """A dataset that this application is writing or has written."""

    store: Store
    index: str
    source: SourcePlan | None
    """None if nothing tells whether another DataFrame holds the same rows."""
    options: Hashable
    writer: weakref.ref[Loan]
    heartbeat: Heartbeat
    """Tells others that this application lives."""
    written: bool = False
    last_used: int = 0


class Loan:
    """One use of a dataset, until it is marked as over or nothing refers to it any more.

    An exception such as KeyboardInterrupt can come between any two steps of the code that uses a
    dataset, even while it cleans up. A counter or a lock would then never be released.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.thread = threading.current_thread()
        self.over = False


class Registry:
    """The datasets of this application, guarded by one lock."""

    def __init__(self) -> None:
        # Not the condition itself, whose __enter__ is Python code that can be interrupted.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: list[Entry] = []
        self._own: set[str] = set()
        self._loans: dict[str, weakref.WeakSet[Loan]] = {}
        self._clock = itertools.count(1)

    def take(self, loan: Loan, store: Store, source: SourcePlan | None, options: Hashable) -> Entry:
        """Return a dataset to use; if it is not written yet, the caller is the one to write it."""
        with self._lock:
            while True:
                self._drop_abandoned(threading.current_thread())
                entry = self._find(source, options)
                if entry is None:
                    index = uuid.uuid4().hex[:12]
                    self._make_way(store, index)
                    heartbeat = Heartbeat(store, owner_path(store, index))
                    entry = Entry(store, index, source, options, weakref.ref(loan), heartbeat)
                    loan.entry = entry
                    self._own.add(index)
                    self._use(index, loan)
                    self._entries.append(entry)
                elif not entry.written:
                    self._changed.wait(_LOOK_AGAIN_SECONDS)
                    continue
                elif not is_whole(entry.store, entry.index):
                    # It was cleared or damaged. Whoever uses it now will get an error when reading
                    # it.
                    entry.source = None
                    self._trim()
                    continue
                else:
                    loan.entry = entry
                    self._use(entry.index, loan)
                return entry

    def written(self, entry: Entry) -> None:
        """Let others use what was written, unless its sources have changed in the meantime."""
        shared = entry.source is not None and entry.source.is_current()
        with self._lock:
            if not shared:
                entry.source = None
            entry.written = True
            self._changed.notify_all()

    def give_back(self, loan: Loan) -> None:
        """Stop using a dataset; delete what is unfinished or need not be kept."""
        with self._lock:
            if loan.entry is not None:
                loan.entry.last_used = next(self._clock)
            self._drop_abandoned()
            self._trim()
            self._changed.notify_all()

    def hold(self, loan: Loan, store: Store, index: str) -> Heartbeat | None:
        """Keep a dataset, whoever wrote it, from being deleted by this process.

        Returns
        -------
        Heartbeat or None
            To be started so that its owner does not delete it either; None where that is this
            process, or where there is no such dataset.
        """
        with self._lock:
            self._use(index, loan)
            is_own = index in self._own
        if is_own or not store.exists(manifest_path(store, index)):
            return None
        return Heartbeat(store, new_hold_path(store, index))

    def clear(
        self, datasets: Sequence[tuple[Store, str]], *, all_owners: bool, force: bool
    ) -> list[str]:
        """Delete datasets that are not in use, and return their indices.

        Those of other processes are deleted if these are gone, or with ``all_owners``; what others
        hold, only with ``force``.
        """
        with self._lock:
            self._drop_abandoned()
            deleted = []
            for store, index in datasets:
                if self._in_use(index):
                    continue
                clock = StoreClock(store)
                if not (all_owners or index in self._own or _is_abandoned(store, index, clock)):
                    continue
                if not force and _is_held(store, index, clock):
                    continue
                for entry in self._entries:
                    if entry.index == index:
                        entry.source = None
                        entry.heartbeat.stop(delete=False)
                _delete_files(store, index)
                self._entries = [entry for entry in self._entries if entry.index != index]
                deleted.append(index)
        return deleted

    def store_of(self, index: str) -> Store | None:
        """Return the store of one of this application's datasets."""
        with self._lock:
            return next((entry.store for entry in self._entries if entry.index == index), None)

    def clear_own(self) -> None:
        """Delete what this application wrote and does not use."""
        with self._lock:
            own = [(entry.store, entry.index) for entry in self._entries]
        self.clear(own, all_owners=False, force=False)

    def end(self) -> None:
        """Delete everything that this application wrote, unless others hold it."""
        entries, self._entries = self._entries, []
        failed: list[object] = []
        for entry in entries:
            entry.heartbeat.stop_soon()
        for entry in entries:
            # Storage that is gone is not tried for each dataset: fsspec has one object for it.
            fs = entry.store.fs
            if fs not in failed:
                entry.heartbeat.stop(delete=False)
                if not _delete(entry.store, entry.index):
                    failed.append(fs)

    def _use(self, index: str, loan: Loan) -> None:
        self._loans.setdefault(index, weakref.WeakSet()).add(loan)

    def _in_use(self, index: str) -> bool:
        return any(not loan.over for loan in list(self._loans.get(index, ())))

    def _find(self, source: SourcePlan | None, options: Hashable) -> Entry | None:
        if source is None:
            return None
        alike = (e for e in self._entries if e.options == options and e.source is not None)
        return next((e for e in alike if e.source and e.source.same_as(source)), None)

    def _make_way(self, store: Store, index: str) -> None:
        """Make sure that nothing lies where a dataset is about to be written.

        Stores report other paths for each index, unless the user's own report one path for all.
        """
        path = store.get_train_data_path(index)
        if path != store.get_train_data_path():
            return
        for entry in list(self._entries):
            if entry.store.get_train_data_path(entry.index) == path and not (
                self._in_use(entry.index) or _is_held(store, entry.index, StoreClock(store))
            ):
                self._remove(entry)
        store.delete(split_path(store, index))
        for taken in (path, store.get_val_data_path(index)):
            if store.exists(taken):
                raise StoreError(
                    f"store: there are files in {taken!r}, where the rows are to be written. The "
                    "store's get_train_data_path and get_val_data_path return one path for all "
                    "datasets. Delete or move these files, train on them with fit_on_parquet(), or "
                    "let the store return other paths for each index."
                )

    def _drop_abandoned(self, waiting: threading.Thread | None = None) -> None:
        """Forget and delete what nobody is writing any more; a waiting thread is not writing."""
        for entry in [entry for entry in self._entries if not entry.written]:
            loan = entry.writer()
            if loan is None or loan.over or loan.thread is waiting or not loan.thread.is_alive():
                self._remove(entry)

    def _trim(self) -> None:
        idle = [e for e in self._entries if e.written and not self._in_use(e.index)]
        idle.sort(key=lambda entry: entry.last_used)
        kept = [entry for entry in idle if entry.source is not None][-KEPT_DATASETS:]
        for entry in idle:
            if entry not in kept:
                self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        # In this order, an interruption leaves nothing that others would use, and it is deleted
        # later.
        entry.source = None
        entry.heartbeat.stop(delete=False)
        _delete(entry.store, entry.index)
        self._entries.remove(entry)
        self._loans.pop(entry.index, None)


def _is_abandoned(store: Store, index: str, clock: StoreClock) -> bool:
    path = owner_path(store, index)
    return is_abandoned(store, path, read_claim(store, path), clock)


def _is_held(store: Store, index: str, clock: StoreClock) -> bool:
    """Return whether an application reads a dataset, as far as its files tell."""
    for path in hold_paths(store, index):
        # Who holds it may be unknown, but not for how long it has been held.
        claim = read_claim(store, path) or Claim(Owner("", 0, ""))
        if store.exists(path) and not is_abandoned(store, path, claim, clock):
            return True
    return False


def _delete(store: Store, index: str) -> bool:
    """Delete a dataset unless it is held: then that is left to an application that comes later.

    Returns
    -------
    bool
        Whether the store could be reached.
    """
    try:
        if _is_held(store, index, StoreClock(store)):
            logger.info("The prepared dataset %s stays: another application reads it.", index)
        else:
            _delete_files(store, index)
    except Exception as error:
        logger.warning(
            "The prepared dataset %s could not be deleted (%s). "
            "hvd_estimators.clear_prepared_data(store) tries again.",
            index,
            error,
        )
        return False
    return True


def _delete_files(store: Store, index: str) -> None:
    # The manifest first: who is interrupted leaves nothing that looks whole. The owner's file last,
    # so that what is left is recognised.
    of_dataset = dataset_paths(store, index)
    for path in (manifest_path(store, index), *hold_paths(store, index), *of_dataset):
        store.delete(path)


def delete_orphans(store: Store) -> None:
    """Delete what processes left behind that are gone, see `is_abandoned`."""
    try:
        clock = StoreClock(store)
        for index in stored_indices(store):
            if _is_abandoned(store, index, clock) and not _is_held(store, index, clock):
                logger.info("Deleting the prepared dataset %s, whose process is gone.", index)
                _delete(store, index)
    except Exception as error:
        logger.warning("Looking for data that dead processes left in %r failed: %s", store, error)
