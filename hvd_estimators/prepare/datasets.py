"""Prepared datasets of this application: writing, sharing, pinning and deleting.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import types as T

from hvd_estimators._util.process_identity import ProcessIdentity
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.exceptions import StoreError
from hvd_estimators.prepare.catalog import (
    PreparedDataset,
    dataset_paths,
    hold_paths,
    is_complete,
    load_manifest,
    manifest_path,
    new_hold_path,
    owner_path,
    split_path,
    stored_datasets,
    stored_indices,
)
from hvd_estimators.prepare.lineage import SourcePlan
from hvd_estimators.store import Store
from hvd_estimators.store.leases import (
    Heartbeat,
    LeaseRecord,
    StoreClock,
    is_abandoned,
    read_lease_record,
)
from hvd_estimators.store.retries import at_exit

__all__ = [
    "KEPT_DATASETS",
    "DatasetUse",
    "Registry",
    "acquire",
    "clear_prepared_data",
    "clear_training_cache",
    "column_metadata",
    "delete_orphans",
    "get_dataset_properties",
    "pin",
    "store_of",
]

logger = logging.getLogger(__name__)


KEPT_DATASETS = 3


"""Number of unused datasets to keep: those that were used last."""


_LOOK_AGAIN_SECONDS = 1.0


"""Interval at which waiting threads check that the writer is still alive."""


@dataclass(eq=False)
class Entry:
    """A dataset that this application is writing or has written."""

    store: Store
    index: str
    source: SourcePlan | None
    """None if it is unknown whether another DataFrame holds the same rows."""
    options: Hashable
    writer: weakref.ref[DatasetUse]
    heartbeat: Heartbeat
    """Shows other processes that this application is alive."""
    written: bool = False
    last_used: int = 0


class DatasetUse:
    """One use of a dataset, until it is marked as over or garbage-collected.

    An exception such as KeyboardInterrupt can occur between any two steps of the code that uses a
    dataset, even during cleanup. A counter or a lock would then never be released.
    """

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.thread = threading.current_thread()
        self.over = False


class Registry:
    """The datasets of this application, guarded by one lock."""

    def __init__(self) -> None:
        # Not the condition itself: its __enter__ is Python code, which can be interrupted.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._entries: list[Entry] = []
        self._own: set[str] = set()
        self._loans: dict[str, weakref.WeakSet[DatasetUse]] = {}
        self._clock = itertools.count(1)

    def take(
        self, loan: DatasetUse, store: Store, source: SourcePlan | None, options: Hashable
    ) -> Entry:
        """Return a dataset to use; if it is not written yet, the caller must write it."""
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
                elif not is_complete(entry.store, entry.index):
                    # It was cleared or damaged. Its current users will get an error when they read
                    # it.
                    entry.source = None
                    self._trim()
                    continue
                else:
                    loan.entry = entry
                    self._use(entry.index, loan)
                return entry

    def written(self, entry: Entry) -> None:
        """Share a written dataset, unless its sources have changed in the meantime."""
        shared = entry.source is not None and entry.source.is_current()
        with self._lock:
            if not shared:
                entry.source = None
            entry.written = True
            self._changed.notify_all()

    def give_back(self, loan: DatasetUse) -> None:
        """Stop using a dataset; delete unfinished datasets and those that need not be kept."""
        with self._lock:
            if loan.entry is not None:
                loan.entry.last_used = next(self._clock)
            self._drop_abandoned()
            self._trim()
            self._changed.notify_all()

    def hold(self, loan: DatasetUse, store: Store, index: str) -> Heartbeat | None:
        """Protect a dataset of any owner from deletion by this process.

        Returns
        -------
        Heartbeat or None
            The caller must start it, so that the dataset's owner does not delete the dataset
            either. None if this process is the owner, or if the dataset does not exist.
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

        Datasets of other processes are deleted if these processes have ended, or with
        ``all_owners``. Datasets that other processes have pinned are deleted only with ``force``.
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
        """Delete this application's datasets that are not in use."""
        with self._lock:
            own = [(entry.store, entry.index) for entry in self._entries]
        self.clear(own, all_owners=False, force=False)

    def end(self) -> None:
        """Delete all datasets of this application, except those that others have pinned."""
        entries, self._entries = self._entries, []
        failed: list[object] = []
        for entry in entries:
            entry.heartbeat.stop_soon()
        for entry in entries:
            # Unavailable storage is not tried again for each dataset: fsspec has one object for it.
            fs = entry.store.fs
            if fs not in failed:
                entry.heartbeat.stop(delete=False)
                if not _delete(entry.store, entry.index):
                    failed.append(fs)

    def _use(self, index: str, loan: DatasetUse) -> None:
        self._loans.setdefault(index, weakref.WeakSet()).add(loan)

    def _in_use(self, index: str) -> bool:
        return any(not loan.over for loan in list(self._loans.get(index, ())))

    def _find(self, source: SourcePlan | None, options: Hashable) -> Entry | None:
        if source is None:
            return None
        alike = (e for e in self._entries if e.options == options and e.source is not None)
        return next((e for e in alike if e.source and e.source.same_as(source)), None)

    def _make_way(self, store: Store, index: str) -> None:
        """Ensure that no files exist at the paths to which a dataset will be written.

        Stores report different paths for each index, unless the user's own store reports one path
        for all.
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
        """Delete unfinished datasets without an active writer; a waiting thread does not write."""
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
        # In this order, an interruption leaves a dataset that others do not use, and that is
        # deleted later.
        entry.source = None
        entry.heartbeat.stop(delete=False)
        _delete(entry.store, entry.index)
        self._entries.remove(entry)
        self._loans.pop(entry.index, None)


def _is_abandoned(store: Store, index: str, clock: StoreClock) -> bool:
    path = owner_path(store, index)
    return is_abandoned(store, path, read_lease_record(store, path), clock)


def _is_held(store: Store, index: str, clock: StoreClock) -> bool:
    """Return whether an application has pinned a dataset, according to its files."""
    for path in hold_paths(store, index):
        # The owner of the pin may be unknown, but its age is known.
        claim = read_lease_record(store, path) or LeaseRecord(ProcessIdentity("", 0, ""))
        if store.exists(path) and not is_abandoned(store, path, claim, clock):
            return True
    return False


def _delete(store: Store, index: str) -> bool:
    """Delete a dataset, unless it is pinned. A later application then deletes it.

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
    # The manifest is deleted first, so that an interruption leaves no dataset that looks valid. The
    # lease record is deleted last, so that the remaining files are recognized.
    of_dataset = dataset_paths(store, index)
    for path in (manifest_path(store, index), *hold_paths(store, index), *of_dataset):
        store.delete(path)


def delete_orphans(store: Store) -> None:
    """Delete datasets that dead processes left behind, see `is_abandoned`."""
    try:
        clock = StoreClock(store)
        for index in stored_indices(store):
            if _is_abandoned(store, index, clock) and not _is_held(store, index, clock):
                logger.info("Deleting the prepared dataset %s, whose process is gone.", index)
                _delete(store, index)
    except Exception as error:
        logger.warning("Looking for data that dead processes left in %r failed: %s", store, error)


_registry = Registry()


_process = os.getpid()


def _end() -> None:
    # A forked process must not delete its parent's data at its exit.
    if os.getpid() == _process:
        _registry.end()


at_exit(_end)


@contextlib.contextmanager
def acquire(
    store: Store, source: SourcePlan | None, options: Hashable, write: Callable[[str], None]
) -> Iterator[str]:
    """Yield the index of a dataset that exists until the block ends, and write it if necessary.

    If several threads request the same dataset, one of them writes it while the others wait. If
    that fails, the writing thread gets the error, and the next thread writes.

    Parameters
    ----------
    store : Store
        Store of the dataset.
    source : SourcePlan or None
        Determines if two DataFrames hold the same rows. With None, only this block uses the
        dataset, and the dataset is deleted when the block ends.
    options : hashable
        All other options that determine the content and location of the dataset.
    write : callable
        ``write(index)`` writes the dataset.
    """
    loan = DatasetUse()
    try:
        entry = _registry.take(loan, store, source, options)
        if not entry.written:
            delete_orphans(store)
            entry.heartbeat.start()
            write(entry.index)
            _registry.written(entry)
        yield entry.index
    finally:
        loan.over = True
        _registry.give_back(loan)


@contextlib.contextmanager
def pin(store: Store, index: str) -> Iterator[None]:
    """Protect a dataset of any owner from deletion until the block ends.

    The protection applies to this process and to others, which see a file beside the dataset.
    """
    loan = DatasetUse()
    heartbeat: Heartbeat | None = None
    try:
        heartbeat = _registry.hold(loan, store, index)
        if heartbeat is not None:
            heartbeat.start()
        yield
    finally:
        loan.over = True
        _registry.give_back(loan)
        if heartbeat is not None:
            heartbeat.stop()


def store_of(index: str) -> Store | None:
    """Return the store of one of this application's datasets; None if unknown."""
    return _registry.store_of(index)


def clear_prepared_data(
    store: Store, dataset_idx: str | None = None, force: bool = False
) -> list[PreparedDataset]:
    """Delete prepared datasets that are not in use. Runs on the driver.

    This deletes the unused datasets of this application, and the datasets of applications that have
    ended. On this machine, an application has ended if its process has. On other machines, it
    counts as ended after five minutes without a heartbeat; the interval of heartbeats is 30
    seconds. The data of running applications is kept. So is the data on which a running application
    trains by ``fit_on_parquet(dataset_idx=…)``, regardless of its owner.

    Parameters
    ----------
    store : Store
        The store to which `prepare_data` wrote.
    dataset_idx : str, optional
        Delete only this dataset, regardless of its owner. It is kept if this process uses it, or if
        a process other than its owner reads it. Default: all datasets.
    force : bool
        Also delete the data that other running applications wrote or read.

    Returns
    -------
    list of PreparedDataset
        The deleted datasets; data that a killed writer left behind has 0 rows.
    """
    datasets = [d for d in stored_datasets(store) if dataset_idx in (None, d.index)]
    chosen = [(store, dataset.index) for dataset in datasets]
    all_owners = force or dataset_idx is not None
    deleted = set(_registry.clear(chosen, all_owners=all_owners, force=force))
    return [dataset for dataset in datasets if dataset.index in deleted]


def clear_training_cache() -> None:
    """Delete this application's prepared datasets that are not in use, in all stores.

    The name is that of ``horovod.spark.common.util``. Runs on the driver.
    """
    _registry.clear_own()


_TYPES: dict[str, type] = {
    "bool": T.BooleanType,
    "float32": T.FloatType,
    "float64": T.DoubleType,
    "int8": T.ByteType,
    "int16": T.ShortType,
    "int32": T.IntegerType,
    "int64": T.LongType,
    "object": T.StringType,
}


_FORMATS = {"vector": "array", "sparse": "custom_sparse_format"}


def get_dataset_properties(
    dataset_idx: str, store: Store | None = None
) -> tuple[int, int, dict[str, dict[str, Any]], float]:
    """Return the properties of a dataset that `prepare_data` wrote. Runs on the driver.

    Parameters
    ----------
    dataset_idx : str
        The index that `prepare_data` yielded.
    store : Store, optional
        The store of the dataset. Default: the store to which this application wrote it.

    Returns
    -------
    train_rows, val_rows : int
        Number of training rows and of validation rows.
    metadata : dict
        Column to a dict, see `column_metadata`.
    avg_row_size : float
        Bytes per training row as stored, compressed.

    Raises
    ------
    StoreError
        If the dataset does not exist.
    """
    store = store or store_of(dataset_idx)
    if store is None:
        raise StoreError(
            f"dataset_idx: this application has not prepared a dataset {dataset_idx!r}, or has "
            "deleted it. Call get_dataset_properties inside the 'with prepare_data(...)' block, or "
            "pass the store that another application wrote to."
        )
    manifest = load_manifest(store, dataset_idx)
    files = {group.file for group in manifest.train.row_groups}
    num_bytes = sum(int(store.fs.size(file)) for file in files)
    return (
        manifest.train.rows,
        manifest.validation.rows if manifest.validation else 0,
        column_metadata(manifest.columns),
        num_bytes / max(manifest.train.rows, 1),
    )


def column_metadata(columns: Iterable[ColumnSpec]) -> dict[str, dict[str, Any]]:
    """Return columns in the format of ``horovod.spark``.

    Parameters
    ----------
    columns : iterable of ColumnSpec
        The columns as stored.

    Returns
    -------
    dict
        Name to a dict with these keys: ``spark_data_type`` (a class), ``is_sparse_vector_only``,
        ``shape`` (of a row; empty for a number), ``intermediate_format``, ``max_size`` (numbers in
        a row) and ``dtype`` (of NumPy, which ``horovod.spark`` does not have).
    """
    return {
        column.name: {
            "spark_data_type": _spark_type(column),
            "is_sparse_vector_only": column.kind == "sparse",
            "shape": list(column.shape),
            "intermediate_format": _FORMATS.get(column.kind, "nochange"),
            "max_size": column.width,
            "dtype": column.dtype,
        }
        for column in columns
    }


def _spark_type(column: ColumnSpec) -> type:
    if column.kind == "sparse":
        return SparseVector
    if column.shape:
        return DenseVector
    return _TYPES.get(column.dtype, T.DoubleType)
