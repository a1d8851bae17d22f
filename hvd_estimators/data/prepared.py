"""Which prepared datasets this application has, and who uses them: each is written once.

Runs on the driver.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from hvd_estimators.data.catalog import (
    PreparedDataset,
    dataset_paths,
    is_whole,
    stored_datasets,
)
from hvd_estimators.data.plans import SourcePlan
from hvd_estimators.store import Store

__all__ = [
    "KEPT_DATASETS",
    "clear_prepared_data",
    "clear_training_cache",
    "hold",
    "lend",
    "store_of",
]

logger = logging.getLogger(__name__)

KEPT_DATASETS = 3
"""Datasets that are kept while nothing uses them: those that were used last."""


@dataclass(eq=False)
class _Entry:
    """A dataset that this application is writing or has written."""

    store: Store
    index: str
    source: SourcePlan | None
    """None where no other DataFrame can be known to hold the same rows."""
    options: Hashable
    written: bool = False
    last_used: int = 0


class _Registry:
    """The datasets of this application; all that it keeps is guarded by one condition."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        self._users: Counter[str] = Counter()
        self._clock = itertools.count(1)

    def take(self, store: Store, source: SourcePlan | None, options: Hashable) -> _Entry:
        """Return a dataset to use; if it is not written yet, the caller is the one to write it."""
        with self._changed:
            while True:
                entry = self._find(source, options)
                if entry is None:
                    entry = _Entry(store, uuid.uuid4().hex[:12], source, options)
                    self._entries.append(entry)
                elif not entry.written:
                    self._changed.wait()
                    continue
                elif not is_whole(entry.store, entry.index):
                    # Somebody cleared or damaged it. Those who use it find out by themselves.
                    entry.source = None
                    self._trim()
                    continue
                self._users[entry.index] += 1
                return entry

    def written(self, entry: _Entry) -> None:
        """Let others use what was written, if its sources did not change meanwhile."""
        shared = entry.source is not None and entry.source.is_current()
        with self._changed:
            entry.written = True
            if not shared:
                entry.source = None
            self._changed.notify_all()

    def failed(self, entry: _Entry) -> None:
        """Forget what could not be written; the next one who waits for it writes."""
        with self._changed:
            self._entries.remove(entry)
            self._users[entry.index] -= 1
            self._changed.notify_all()
        _delete(entry.store, entry.index)

    def release(self, entry: _Entry) -> None:
        """Stop using a dataset; delete what is no longer to be kept."""
        with self._changed:
            self._users[entry.index] -= 1
            entry.last_used = next(self._clock)
            self._trim()

    @contextlib.contextmanager
    def hold(self, index: str) -> Iterator[None]:
        """Keep a dataset, whoever wrote it, from being deleted by this process."""
        with self._changed:
            self._users[index] += 1
        try:
            yield
        finally:
            with self._changed:
                self._users[index] -= 1
                self._trim()

    def clear(self, datasets: Sequence[tuple[Store, str]]) -> list[str]:
        """Delete datasets that are not in use, and return their indices."""
        with self._changed:
            writing = {entry.index for entry in self._entries if not entry.written}
            unused = [
                (store, index)
                for store, index in datasets
                if self._users[index] <= 0 and index not in writing
            ]
            indices = {index for _, index in unused}
            self._entries = [entry for entry in self._entries if entry.index not in indices]
            for store, index in unused:
                for path in dataset_paths(store, index):
                    store.delete(path)
        return [index for _, index in unused]

    def store_of(self, index: str) -> Store | None:
        """Return where a dataset of this application lies."""
        with self._changed:
            return next((entry.store for entry in self._entries if entry.index == index), None)

    def clear_own(self) -> None:
        """Delete what this application wrote and does not use."""
        with self._changed:
            own = [(entry.store, entry.index) for entry in self._entries]
        self.clear(own)

    def end(self) -> None:
        """Delete everything that this application wrote. Nothing can be in use any more."""
        for entry in self._entries:
            _delete(entry.store, entry.index)
        self._entries = []

    def _find(self, source: SourcePlan | None, options: Hashable) -> _Entry | None:
        if source is None:
            return None
        alike = (e for e in self._entries if e.options == options and e.source is not None)
        return next((e for e in alike if e.source and e.source.same_as(source)), None)

    def _trim(self) -> None:
        idle = [e for e in self._entries if e.written and self._users[e.index] <= 0]
        idle.sort(key=lambda entry: entry.last_used)
        kept = [entry for entry in idle if entry.source is not None][-KEPT_DATASETS:]
        for entry in idle:
            if entry not in kept:
                self._entries.remove(entry)
                _delete(entry.store, entry.index)


def _delete(store: Store, index: str) -> None:
    try:
        for path in dataset_paths(store, index):
            store.delete(path)
    except Exception as error:
        logger.warning(
            "The prepared dataset %s could not be deleted (%s). "
            "hvd_estimators.clear_prepared_data(store) tries again.",
            index,
            error,
        )


_registry = _Registry()
_process = os.getpid()


@atexit.register
def _end() -> None:
    # A forked process ends without taking its parent's data with it.
    if os.getpid() == _process:
        _registry.end()


@contextlib.contextmanager
def lend(
    store: Store, source: SourcePlan | None, options: Hashable, write: Callable[[str], None]
) -> Iterator[str]:
    """Yield the index of a dataset that is there until the block ends, written only if need be.

    Of several threads that ask for the same, one writes and the others wait for it. If it fails,
    its own thread gets the error, and the next one writes.

    Parameters
    ----------
    store : Store
        Where the dataset lies.
    source : SourcePlan or None
        What tells whether two DataFrames hold the same rows; None: the dataset is for this block
        alone, and deleted at its end.
    options : hashable
        Everything else that decides what is written, and where.
    write : callable
        ``write(index)`` writes the dataset.
    """
    entry = _registry.take(store, source, options)
    if not entry.written:
        try:
            write(entry.index)
        except BaseException:
            _registry.failed(entry)
            raise
        _registry.written(entry)
    try:
        yield entry.index
    finally:
        _registry.release(entry)


def hold(index: str) -> contextlib.AbstractContextManager[None]:
    """Keep a dataset, whoever wrote it, from being deleted by this process until a block ends."""
    return _registry.hold(index)


def store_of(index: str) -> Store | None:
    """Return where a dataset of this application lies; None if it has none of that name."""
    return _registry.store_of(index)


def clear_prepared_data(store: Store, dataset_idx: str | None = None) -> list[PreparedDataset]:
    """Delete prepared datasets that this process does not use. Runs on the driver.

    What killed writers left is deleted, too. Other applications are not asked: do not call this
    while another one prepares data in this store or trains on it.

    Parameters
    ----------
    store : Store
        Where `prepare_data` wrote.
    dataset_idx : str, optional
        The only one to delete. Default: all.

    Returns
    -------
    list of PreparedDataset
        What was deleted; what a killed writer left has 0 rows.
    """
    datasets = [d for d in stored_datasets(store) if dataset_idx in (None, d.index)]
    deleted = set(_registry.clear([(store, dataset.index) for dataset in datasets]))
    return [dataset for dataset in datasets if dataset.index in deleted]


def clear_training_cache() -> None:
    """Delete the prepared datasets of this application that are not in use, in all stores.

    The name is that of ``horovod.spark.common.util``. Runs on the driver.
    """
    _registry.clear_own()
