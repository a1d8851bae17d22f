"""fsspec filesystem for HDFS on top of hdfs-native, without a JVM or environment variables.

Importing this module requires hdfs-native. Runs on the driver and on ranks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem
from hdfs_native import Client
from hdfs_native.fsspec import HdfsFileSystem

from hvd_estimators.exceptions import ParamError

_PATIENCE = {"dfs.client.failover.max.attempts": "4"}
"""The store has its own retries; by default, hdfs-native retries name nodes for minutes."""

_lock = threading.Lock()
_user: str | None = None


class ConfiguredHdfs(HdfsFileSystem):
    """Filesystem for HDFS and viewfs with a user, a ticket cache and Hadoop settings.

    Parameters
    ----------
    url : str
        Scheme and authority, as in ``hdfs://namenode:8020``.
    config : mapping
        Hadoop settings. They override the configuration folder.
    user : str, optional
        User that reads and writes; with Kerberos, a principal.
    ticket_cache : str, optional
        Path of a Kerberos ticket cache file.
    """

    def __init__(
        self,
        url: str,
        config: Mapping[str, str],
        user: str | None = None,
        ticket_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Skip the constructor of the base class, which does not pass a ticket cache.
        AbstractFileSystem.__init__(self, **kwargs)
        self._url = url
        kerberos = {}
        if ticket_cache is not None:
            kerberos = {"kerberos_cache": ticket_cache, "kerberos_principal": user}
        elif user is not None:
            _become(user)
        self.client = Client(url, {**_PATIENCE, **config}, **kerberos)
        # Never free the client. In a forked process, fsspec drops its filesystems. Freeing a client
        # there blocks indefinitely on threads that exist only in the parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.client))

    @property
    def fsid(self) -> str:
        """Key that fsspec uses to distinguish filesystems."""
        return f"hvd_estimators_{self._url}"


def _become(user: str) -> None:
    """Set the HDFS user of this process; hdfs-native supports only one per process.

    Raises
    ------
    ParamError
        If another store of this process has set a different user.
    """
    global _user
    with _lock:
        if _user not in (None, user):
            raise ParamError(
                f"user: expected {_user!r}, with which this process has already opened HDFS, found "
                f"{user!r}. hdfs-native has one user per process: use another process."
            )
        _user = user
        os.environ["HADOOP_USER_NAME"] = user
