"""Stores: the storage of datasets, checkpoints and logs."""

from __future__ import annotations

from hvd_estimators.store.base import RunPaths, Store
from hvd_estimators.store.filesystem import FilesystemStore
from hvd_estimators.store.hdfs import HDFSStore
from hvd_estimators.store.local import DBFSLocalStore, LocalStore, VolumesStore
from hvd_estimators.store.registry import register_store

__all__ = [
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "RunPaths",
    "Store",
    "VolumesStore",
    "register_store",
]
