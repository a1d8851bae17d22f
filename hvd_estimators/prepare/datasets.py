"""Prepared datasets of this application: owned, shared, pinned and swept.

Runs on the driver.

Runs on the driver.

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
from hvd_estimators.store.exit_hooks import at_exit
from hvd_estimators.store.leases import (
    Heartbeat,
    LeaseRecord,
    StoreClock,
    is_abandoned,
    read_lease_record,
)

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
    writer: weakref.ref[DatasetUse]
    heartbeat: Heartbeat
    """Tells others that this application lives."""
    written: bool = False
    last_used: int = 0


class DatasetUse:
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
        self._loans: dict[str, weakref.WeakSet[DatasetUse]] = {}
        self._clock = itertools.count(1)

    def take(
        self, loan: DatasetUse, store: Store, source: SourcePlan | None, options: Hashable
    ) -> Entry:
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
                elif not is_complete(entry.store, entry.index):
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

    def give_back(self, loan: DatasetUse) -> None:
        """Stop using a dataset; delete what is unfinished or need not be kept."""
        with self._lock:
            if loan.entry is not None:
                loan.entry.last_used = next(self._clock)
            self._drop_abandoned()
            self._trim()
            self._changed.notify_all()

    def hold(self, loan: DatasetUse, store: Store, index: str) -> Heartbeat | None:
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
    return is_abandoned(store, path, read_lease_record(store, path), clock)


def _is_held(store: Store, index: str, clock: StoreClock) -> bool:
    """Return whether an application reads a dataset, as far as its files tell."""
    for path in hold_paths(store, index):
        # Who holds it may be unknown, but not for how long it has been held.
        claim = read_lease_record(store, path) or LeaseRecord(ProcessIdentity("", 0, ""))
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


_registry = Registry()


_process = os.getpid()


def _end() -> None:
    # A forked process must not delete its parent's data when it ends.
    if os.getpid() == _process:
        _registry.end()


at_exit(_end)


@contextlib.contextmanager
def acquire(
    store: Store, source: SourcePlan | None, options: Hashable, write: Callable[[str], None]
) -> Iterator[str]:
    """Yield the index of a dataset that exists until the block ends. It is written only if needed.

    If several threads ask for the same dataset, one of them writes it while the others wait. If
    that fails, the writing thread gets the error, and the next thread writes.

    Parameters
    ----------
    store : Store
        Where the dataset is kept.
    source : SourcePlan or None
        Tells whether two DataFrames hold the same rows. With None, the dataset is for this block
        alone and is deleted at its end.
    options : hashable
        Everything else that decides what is written, and where.
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
    """Keep a dataset, whoever wrote it, from being deleted until a block ends.

    Neither by this process nor by others: a file beside the dataset tells them.
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

    This deletes what this application wrote and no longer uses, and what applications left behind
    that are gone: on this machine as soon as their process has ended, on other machines when they
    have given no sign of life for five minutes (they do so every 30 seconds). The data of
    applications that are running is kept, and so is what a running application trains on by
    ``fit_on_parquet(dataset_idx=…)``, whoever wrote it.

    Parameters
    ----------
    store : Store
        Where `prepare_data` wrote.
    dataset_idx : str, optional
        The only one to delete, whoever wrote it, unless this process or one that only reads it
        uses it. Default: all.
    force : bool
        Also delete the data of other applications that are running, and what they read.

    Returns
    -------
    list of PreparedDataset
        What was deleted; what a killed writer left behind has 0 rows.
    """
    datasets = [d for d in stored_datasets(store) if dataset_idx in (None, d.index)]
    chosen = [(store, dataset.index) for dataset in datasets]
    all_owners = force or dataset_idx is not None
    deleted = set(_registry.clear(chosen, all_owners=all_owners, force=force))
    return [dataset for dataset in datasets if dataset.index in deleted]


def clear_training_cache() -> None:
    """Delete the prepared datasets of this application that are not in use, in all stores.

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
    """Return what is known about a dataset that `prepare_data` wrote. Runs on the driver.

    Parameters
    ----------
    dataset_idx : str
        What `prepare_data` yielded.
    store : Store, optional
        Where it lies. Default: where this application wrote it.

    Returns
    -------
    train_rows, val_rows : int
        Rows to train and to validate on.
    metadata : dict
        Column to a dict, see `column_metadata`.
    avg_row_size : float
        Bytes of a training row as it is stored, compressed.

    Raises
    ------
    StoreError
        If there is no such dataset.
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
    """Return columns as ``horovod.spark`` describes them.

    Parameters
    ----------
    columns : iterable of ColumnSpec
        The columns as they are stored.

    Returns
    -------
    dict
        Name to a dict of ``spark_data_type`` (a class), ``is_sparse_vector_only``, ``shape`` (of a
        row; empty for a number), ``intermediate_format``, ``max_size`` (numbers in a row) and
        ``dtype`` (NumPy's, which ``horovod.spark`` does not have).
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
