"""``horovod.spark.common.store``: stores for datasets, checkpoints and logs."""

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
