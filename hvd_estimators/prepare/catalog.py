"""Catalog of the prepared datasets in a store, from all applications.

A dataset exists once its manifest exists, which is written last. Runs on the driver.
"""

from __future__ import annotations

import datetime
import posixpath
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from hvd_estimators.data.manifest import MANIFEST_FILE, DatasetManifest
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import Store
from hvd_estimators.store.base import require_store

__all__ = [
    "PreparedDataset",
    "dataset_paths",
    "hold_paths",
    "is_complete",
    "list_prepared_data",
    "load_manifest",
    "manifest_path",
    "new_hold_path",
    "owner_path",
    "split_path",
    "stored_datasets",
    "stored_indices",
]

_SPLIT = ".split"
_OWNER = ".owner"
_HOLD = ".hold-"


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


def list_prepared_data(store: Store) -> list[PreparedDataset]:
    """Return the finished datasets in a store, the oldest first. Runs on the driver.

    The result includes the datasets of other applications, even if they ended without deleting
    them. It does not include data that is still being written, or that a killed writer left behind.

    Parameters
    ----------
    store : Store
        The store to which `prepare_data` wrote.

    Returns
    -------
    list of PreparedDataset
        See `clear_prepared_data` for how to delete them.
    """
    return [dataset for dataset in stored_datasets(store) if dataset.rows]


def stored_datasets(store: Store) -> list[PreparedDataset]:
    """Return all datasets in a store, the oldest first, and data of killed writers (0 rows)."""
    require_store(store)
    datasets = [_describe(store, index) for index in stored_indices(store)]
    earliest = datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)
    return sorted(datasets, key=lambda dataset: (dataset.created or earliest, dataset.index))


def stored_indices(store: Store) -> list[str]:
    """Return the indices of all datasets that `stored_datasets` returns."""
    store.fs.invalidate_cache()
    return list(dict.fromkeys(_numbered(store, store.get_train_data_path())))


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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"dataset_idx: the manifest of the prepared dataset {dataset_idx!r} is damaged "
            f"({path!r}: {error!r}). Prepare the data again; clear_prepared_data(store, "
            f"{dataset_idx!r}) deletes what is left."
        ) from error


def is_complete(store: Store, index: str) -> bool:
    """Return whether a dataset's manifest and all files that it names exist."""
    store.fs.invalidate_cache()
    try:
        manifest = load_manifest(store, index)
    except StoreError:
        return False
    splits = [manifest.train, *([manifest.validation] if manifest.validation else [])]
    present = {file for split in splits for file in store.find(split.path)}
    return present >= {group.file for split in splits for group in split.row_groups}


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


def new_hold_path(store: Store, index: str) -> str:
    """Return a path for the file by which an application pins a dataset that it reads."""
    return store.get_train_data_path(index) + _HOLD + uuid.uuid4().hex


def hold_paths(store: Store, index: str) -> list[str]:
    """Return the paths of a dataset's existing pin files."""
    store.fs.invalidate_cache()
    parent, name = posixpath.split(store.get_train_data_path(index) + _HOLD)
    return [f"{parent}/{entry}" for entry in store.names(parent) if entry.startswith(name)]


def dataset_paths(store: Store, index: str) -> tuple[str, ...]:
    """Return all paths of a dataset, with the manifest's folder first and the lease record last."""
    train, val = store.get_train_data_path(index), store.get_val_data_path(index)
    if val == store.get_val_data_path() and not _validates_in(store, index, val):
        # The store reports one path for all datasets, and the files there belong to another
        # dataset.
        return train, split_path(store, index), owner_path(store, index)
    return train, val, split_path(store, index), owner_path(store, index)


def _validates_in(store: Store, index: str, path: str) -> bool:
    try:
        manifest = load_manifest(store, index)
    except StoreError:
        return False
    return manifest.validation is not None and manifest.validation.path == path


def _numbered(store: Store, path: str) -> Iterator[str]:
    """Yield the indices of the datasets whose names begin with the given path."""
    parent, name = posixpath.split(path)
    # An index is 12 hexadecimal digits, so that no other file is mistaken for a dataset.
    endings = rf"{re.escape(_SPLIT)}|{re.escape(_OWNER)}|{re.escape(_HOLD)}[0-9a-f]+"
    pattern = re.compile(rf"{re.escape(name)}\.([0-9a-f]{{12}})(?:{endings})?")
    for entry in store.names(parent):
        match = pattern.fullmatch(entry)
        if match:
            yield match[1]


def _describe(store: Store, index: str) -> PreparedDataset:
    num_bytes = sum(
        file["size"] or 0
        for folder in dataset_paths(store, index)[:-1]
        for file in store.fs.find(folder, detail=True).values()
    )
    try:
        manifest = load_manifest(store, index)
    except StoreError:
        return PreparedDataset(index, 0, 0, (), num_bytes, None)
    return PreparedDataset(
        index,
        manifest.train.rows,
        manifest.validation.rows if manifest.validation else 0,
        tuple(column.name for column in manifest.columns),
        num_bytes,
        store.modified(manifest_path(store, index)),
        manifest.train.path,
        manifest.validation.path if manifest.validation else None,
    )
