"""``horovod.spark.common.store``: where datasets, checkpoints and logs live."""

from __future__ import annotations

from hvd_estimators.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store

__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]

AbstractFilesystemStore = Store
