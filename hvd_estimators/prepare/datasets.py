"""Prepared datasets in a store: written, shared by the fits of a grid, listed and deleted.

A dataset exists once its manifest exists, which is written last. Runs on the driver.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import posixpath
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import types as T

from hvd_estimators.data.manifest import MANIFEST_FILE, ColumnSpec, DatasetManifest, JoinedSpec
from hvd_estimators.data.types import SPARK_DTYPES
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import Store
from hvd_estimators.store.base import as_store
from hvd_estimators.store.leases import (
    UNREADABLE,
    Clock,
    Heartbeat,
    is_abandoned,
    read_lease_record,
    store_time,
)
from hvd_estimators.store.retries import at_exit

logger = logging.getLogger(__name__)

_SPLIT = ".split"
_OWNER = ".owner"


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset that `prepare_data` wrote.

    Attributes
    ----------
    index : str
        The index that `prepare_data` yielded.
    rows, validation_rows : int
        Training rows and validation rows. Both are 0 for data that a killed writer left behind.
    columns : tuple of str
        Names of the DataFrame's columns in the dataset.
    num_bytes : int
        Size of the dataset's files.
    created : datetime.datetime or None
        Time of completion, in UTC; None if the store does not record it.
    train_path, validation_path : str or None
        Folders of the Parquet files for training and for validation, for other programs to read.
    """

    index: str
    rows: int
    validation_rows: int
    columns: tuple[str, ...]
    num_bytes: int
    created: datetime.datetime | None
    train_path: str | None = None
    validation_path: str | None = None


def list_prepared_data(store: Store | str) -> list[PreparedDataset]:
    """Return the finished datasets in a store, the oldest first. Runs on the driver.

    The result includes the datasets of other applications, even if they ended without deleting
    them. It does not include data that is still being written, or that a killed writer left behind.

    Parameters
    ----------
    store : Store or str
        The store to which `prepare_data` wrote, or its path or URL.

    Returns
    -------
    list of PreparedDataset
        See `clear_prepared_data` for how to delete them.
    """
    return [dataset for dataset in _stored_datasets(as_store(store)) if dataset.rows]


def _stored_datasets(store: Store) -> list[PreparedDataset]:
    """Return all datasets in a store, the oldest first, and data of killed writers (0 rows)."""
    datasets = [describe_dataset(store, index) for index in stored_indices(store)]
    earliest = datetime.datetime.min.replace(tzinfo=datetime.UTC)
    return sorted(datasets, key=lambda dataset: (dataset.created or earliest, dataset.index))


def stored_indices(store: Store) -> list[str]:
    """Return the indices of all datasets in a store, including datasets of killed writers."""
    parent, name = posixpath.split(store.get_train_data_path())
    # An index is 12 hexadecimal digits, so that no other file is mistaken for a dataset.
    endings = f"{re.escape(_SPLIT)}|{re.escape(_OWNER)}"
    pattern = re.compile(rf"{re.escape(name)}\.([0-9a-f]{{12}})(?:{endings})?")
    matches = map(pattern.fullmatch, store.names(parent))
    return list(dict.fromkeys(match[1] for match in matches if match))


def describe_dataset(store: Store, index: str) -> PreparedDataset:
    """Return the rows, columns and size of a dataset."""
    num_bytes = dataset_bytes(store, index)
    try:
        manifest = load_manifest(store, index)
    except StoreError:
        return PreparedDataset(index, 0, 0, (), num_bytes, None)
    return PreparedDataset(
        index,
        manifest.train.rows,
        manifest.validation_rows,
        tuple(column.name for column in manifest.columns),
        num_bytes,
        store.modified(manifest_path(store, index)),
        manifest.train.path,
        manifest.validation.path if manifest.validation else None,
    )


def dataset_bytes(store: Store, index: str) -> int:
    """Return the size of a dataset's files in bytes."""
    return sum(
        file["size"] or 0
        for folder in dataset_paths(store, index)[:-1]
        for file in store.fs.find(folder, detail=True).values()
    )


def load_manifest(store: Store, dataset_idx: str) -> DatasetManifest:
    """Read the manifest of a dataset that `prepare_data` wrote.

    Raises
    ------
    StoreError
        If the dataset does not exist, or its manifest is damaged.
    """
    path = manifest_path(store, dataset_idx)
    if not store.exists(path):
        raise StoreError(
            f"dataset_idx: the store holds no prepared dataset {dataset_idx!r} (looked for "
            f"{path!r}). Call fit_on_parquet inside the 'with prepare_data(...)' block."
        )
    try:
        return DatasetManifest.from_json(store.read(path).decode())
    except ValueError as error:
        raise StoreError(
            f"dataset_idx: the manifest of the prepared dataset {dataset_idx!r} is damaged "
            f"({path!r}: {error}). Prepare the data again; clear_prepared_data(store, "
            f"{dataset_idx!r}) deletes what is left."
        ) from error


def manifest_path(store: Store, index: str) -> str:
    """Return the path of a dataset's manifest."""
    return f"{store.get_train_data_path(index)}/{MANIFEST_FILE}"


def split_path(store: Store, index: str) -> str:
    """Return the path at which Spark writes a dataset with validation, each side in a folder.

    The folders are then moved to the paths that the store reports for the two sides.
    """
    return store.get_train_data_path(index) + _SPLIT


def owner_path(store: Store, index: str) -> str:
    """Return the path of a dataset's lease record, see `read_lease_record`."""
    return store.get_train_data_path(index) + _OWNER


def dataset_paths(store: Store, index: str) -> tuple[str, ...]:
    """Return all paths of a dataset, with the manifest's folder first and the lease record last."""
    train, val = store.get_train_data_path(index), store.get_val_data_path(index)
    others = split_path(store, index), owner_path(store, index)
    if val == store.get_val_data_path() and not _validates_in(store, index, val):
        # A store with one folder for all datasets, as in horovod.spark's tests: what is there
        # belongs to another one.
        return train, *others
    return train, val, *others


def _validates_in(store: Store, index: str, path: str) -> bool:
    try:
        manifest = load_manifest(store, index)
    except StoreError:
        return False
    return manifest.validation is not None and manifest.validation.path == path


_own: dict[str, tuple[Store, weakref.ref[Heartbeat]]] = {}
"""The datasets that this process has started to write and not deleted, by index.

The block that uses a dataset holds its heartbeat. If an exception such as KeyboardInterrupt ends
the block before it could delete the dataset, the heartbeat is garbage-collected, and the dataset is
no longer in use.
"""

_process = os.getpid()


def _is_in_use(index: str) -> bool:
    """Return whether a block of this process uses a dataset."""
    heartbeat = _own[index][1]() if index in _own else None
    return heartbeat is not None and heartbeat.is_beating


def _is_orphan(store: Store, index: str, clock: Clock | None = None) -> bool:
    path = owner_path(store, index)
    record = read_lease_record(store, path)
    # A dataset of an unknown owner stays.
    return record not in (None, UNREADABLE) and is_abandoned(store, path, record, clock)


def _delete(store: Store, index: str) -> None:
    """Delete a dataset. Does not raise."""
    try:
        _delete_files(store, index)
        _own.pop(index, None)
    except Exception as error:
        logger.warning(
            "The prepared dataset %s could not be deleted (%s). "
            "hvd_estimators.clear_prepared_data(store) tries again.",
            index,
            error,
        )


def _delete_files(store: Store, index: str) -> None:
    # The manifest is deleted first, so that an interruption leaves no dataset that looks valid. The
    # lease record is deleted last, so that the remaining files are recognized.
    for path in (manifest_path(store, index), *dataset_paths(store, index)):
        store.delete(path)


def _delete_orphans(store: Store) -> None:
    """Delete datasets that dead processes left behind, see `is_abandoned`."""
    try:
        folder = posixpath.dirname(store.get_train_data_path())
        clock = functools.cache(functools.partial(store_time, store, folder))
        for index in stored_indices(store):
            if _is_orphan(store, index, clock):
                logger.info("Deleting the prepared dataset %s, whose process is gone.", index)
                _delete(store, index)
    except Exception as error:
        logger.warning("Looking for data that dead processes left in %r failed: %s", store, error)


def _delete_own(is_last: bool) -> None:
    # A forked process must not delete its parent's data at its exit.
    for index, (store, beating) in list(_own.items()) if os.getpid() == _process else ():
        heartbeat = beating()
        if heartbeat is not None:
            if heartbeat.has_awaited_user and not is_last:
                continue
            heartbeat.stop(delete=False)
        _delete(store, index)


at_exit(_delete_own)


def _require_free_paths(store: Store, index: str) -> None:
    """Check that a path is free if a user's store has one for all datasets."""
    path = store.get_train_data_path(index)
    if path != store.get_train_data_path():
        return
    owner = read_lease_record(store, owner_path(store, index))
    if owner is not None and not is_abandoned(store, owner_path(store, index), owner):
        raise StoreError(
            f"another fit, or prepare_data, writes or holds a dataset in {path!r}, and the store "
            "has one path for all datasets.",
            param="store",
            remedy="Wait until it has ended, or let get_train_data_path and get_val_data_path "
            "return other paths for each index.",
        )
    store.delete(split_path(store, index))
    for folder in (path, store.get_val_data_path(index)):
        if store.exists(folder):
            raise StoreError(
                f"there are files in {folder!r}, where the rows should be written, and the store "
                "has one path for all datasets.",
                param="store",
                remedy="Delete or move these files, train on them with fit_on_parquet(), or let "
                "get_train_data_path and get_val_data_path return other paths for each index.",
            )


@contextlib.contextmanager
def acquire(store: Store, write: Callable[[str], None]) -> Iterator[str]:
    """Write a dataset, and yield its index. The dataset exists until the block ends.

    Parameters
    ----------
    store : Store
        Store of the dataset.
    write : callable
        ``write(index)`` writes the dataset.
    """
    index = uuid.uuid4().hex[:12]
    _delete_orphans(store)
    _require_free_paths(store, index)
    heartbeat = Heartbeat(store, owner_path(store, index))
    _own[index] = store, weakref.ref(heartbeat)
    try:
        heartbeat.start()
        write(index)
        yield index
    finally:
        heartbeat.stop(delete=False)
        _delete(store, index)


@dataclass
class _SharedDataset:
    options: Mapping[str, Any]
    lock: threading.Lock
    index: str | None = None


class SharedDatasets:
    """Datasets of several fits of one DataFrame. Each is written once, by the first fit.

    The datasets are deleted when the last fit ends. If fewer fits run, the datasets are deleted
    when this object is garbage-collected.

    Parameters
    ----------
    num_fits : int
        Number of fits, which may run in several threads.
    """

    def __init__(self, num_fits: int) -> None:
        self._fits_left = num_fits
        self._lock = threading.Lock()
        self._datasets: list[_SharedDataset] = []
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def acquire(
        self,
        options: Mapping[str, Any],
        prepare: Callable[..., contextlib.AbstractContextManager[str]],
    ) -> Iterator[str]:
        """Yield the index of the dataset with equal options; call ``prepare(**options)`` once.

        Other threads with equal options wait. If writing fails, the next thread writes.
        """
        with self._lock:
            dataset = next((each for each in self._datasets if each.options == options), None)
            if dataset is None:
                dataset = _SharedDataset(options, threading.Lock())
                self._datasets.append(dataset)
        with dataset.lock:
            if dataset.index is None:
                dataset.index = self._open.enter_context(prepare(**options))
        yield dataset.index

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """Mark one of the fits; the end of the last one deletes the datasets."""
        try:
            yield
        finally:
            with self._lock:
                self._fits_left -= 1
                is_last = not self._fits_left
            if is_last:
                self._open.close()


def clear_prepared_data(
    store: Store | str, dataset_idx: str | None = None, force: bool = False
) -> list[PreparedDataset]:
    """Delete prepared datasets that are not in use. Runs on the driver.

    This deletes the store's unused datasets of this application, and of applications that have
    ended. On this machine, an application has ended if its process has. On other machines, it
    counts as ended after five minutes without a heartbeat; the interval of heartbeats is 30
    seconds. The data of running applications is kept.

    Parameters
    ----------
    store : Store or str
        The store to which `prepare_data` wrote, or its path or URL.
    dataset_idx : str, optional
        Delete only this dataset, regardless of its owner. It is kept if this process uses it.
        Default: all datasets.
    force : bool
        Also delete the data that other running applications wrote.

    Returns
    -------
    list of PreparedDataset
        The deleted datasets; data that a killed writer left behind has 0 rows.
    """
    store = as_store(store)
    deleted = []
    for dataset in _stored_datasets(store):
        index = dataset.index
        if dataset_idx is None:
            is_chosen = force or index in _own or _is_orphan(store, index)
        else:
            is_chosen = index == dataset_idx
        if is_chosen and not _is_in_use(index):
            _delete_files(store, index)
            _own.pop(index, None)
            deleted.append(dataset)
    return deleted


def clear_training_cache() -> None:
    """Delete this application's prepared datasets that are not in use, in all stores.

    `prepare_data` and ``fit`` delete their datasets themselves, so that this is rarely necessary.
    ``horovod.spark.common.util`` has the same name. Runs on the driver.
    """
    for index, (store, _) in list(_own.items()):
        if not _is_in_use(index):
            _delete(store, index)


def get_dataset_properties(
    dataset_idx: str, store: Store | str | None = None
) -> tuple[int, int, dict[str, dict[str, Any]], float]:
    """Return the properties of a dataset that `prepare_data` wrote. Runs on the driver.

    Parameters
    ----------
    dataset_idx : str
        The index that `prepare_data` yielded.
    store : Store or str, optional
        The store of the dataset, or its path or URL. Default: the store to which this application
        wrote it.

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
    if store is None and dataset_idx not in _own:
        raise StoreError(
            f"dataset_idx: this application has not prepared a dataset {dataset_idx!r}, or has "
            "deleted it. Call get_dataset_properties inside the 'with prepare_data(...)' block, or "
            "pass the store that another application wrote to."
        )
    found = _own[dataset_idx][0] if store is None else as_store(store)
    manifest = load_manifest(found, dataset_idx)
    files = {group.file for group in manifest.train.row_groups}
    num_bytes = sum(int(found.fs.size(file)) for file in files)
    return (
        manifest.train.rows,
        manifest.validation_rows,
        column_metadata(manifest.columns),
        num_bytes / max(manifest.train.rows, 1),
    )


_FORMATS = {"vector": "array", "sparse": "custom_sparse_format"}


def column_metadata(columns: Iterable[ColumnSpec]) -> dict[str, dict[str, Any]]:
    """Return columns in the format of ``horovod.spark``.

    Parameters
    ----------
    columns : iterable of ColumnSpec
        The columns as read; columns that are read as one get their own entries, too.

    Returns
    -------
    dict
        Name to a dict with these keys: ``spark_data_type`` (a class), ``is_sparse_vector_only``,
        ``shape`` (of a row; empty for a number), ``intermediate_format``, ``max_size`` (numbers in
        a row) and ``dtype`` (of NumPy, which ``horovod.spark`` does not have).
    """
    columns = tuple(columns)
    members = (m for column in columns if isinstance(column, JoinedSpec) for m in column.members)
    return {
        column.name: {
            "spark_data_type": _spark_type(column),
            "is_sparse_vector_only": column.kind == "sparse",
            "intermediate_format": _FORMATS.get(column.kind, "nochange"),
            "dtype": column.dtype,
            # Rows of any length have no shape.
            **(
                {}
                if column.kind == "any"
                else {"shape": list(column.shape), "max_size": column.width}
            ),
        }
        for column in (*columns, *members)
        if column.kind != "rows"
    }


def _spark_type(column: ColumnSpec) -> type:
    if column.kind == "sparse":
        return SparseVector
    if column.shape:
        return DenseVector
    if column.kind == "text":
        return T.StringType
    # Decimals, the last type in the table, are written as doubles.
    names = (name for name, dtype in SPARK_DTYPES.items() if dtype == column.dtype)
    spark_type: type = getattr(T, next(names, "DoubleType"))
    return spark_type
