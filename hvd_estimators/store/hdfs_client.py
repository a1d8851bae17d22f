"""fsspec's filesystem of HDFS by hdfs-native: no JVM, and nothing of a process's environment.

Importing this needs hdfs-native. Runs on both sides.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from hdfs_native import Client
from hdfs_native.fsspec import HdfsFileSystem

from hvd_estimators.exceptions import ParamError, StoreError

__all__ = ["ConfiguredHdfs", "principal_of"]

_PATIENCE = {"dfs.client.failover.max.attempts": "4"}
"""The store has retries of its own; by default name nodes are tried for minutes."""

_lock = threading.Lock()
_user: str | None = None


class ConfiguredHdfs(HdfsFileSystem):
    """HDFS, or what viewfs mounts, with a user, a ticket cache and a configuration of its own.

    Parameters
    ----------
    url : str
        Scheme and authority, as in ``hdfs://namenode:8020``.
    config : mapping
        Hadoop's settings; they win over those of the configuration folder.
    user : str, optional
        Who reads and writes; with Kerberos a principal.
    ticket_cache : str, optional
        A Kerberos ticket cache, a file.
    """

    def __init__(
        self,
        url: str,
        config: Mapping[str, str],
        user: str | None = None,
        ticket_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Not that of the base, which passes no ticket.
        AbstractFileSystem.__init__(self, **kwargs)
        self._url = url
        kerberos = {}
        if ticket_cache is not None:
            kerberos = {
                "kerberos_cache": ticket_cache,
                "kerberos_principal": user or principal_of(ticket_cache),
            }
        elif user is not None:
            _become(user)
        self.client = Client(url, {**_PATIENCE, **config}, **kerberos)
        # It is never given up. fsspec forgets its filesystems in a process that was forked, and who
        # gives up a client there waits for ever for threads that only the parent has.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.client))

    @property
    def fsid(self) -> str:
        """What fsspec tells filesystems apart by."""
        return f"hvd_estimators_{self._url}"


def _become(user: str) -> None:
    """Set the user of this process's connections to HDFS: hdfs-native knows one, of the process.

    Raises
    ------
    ParamError
        If another store of this process has set another one.
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


def principal_of(ticket_cache: str) -> str:
    """Return the principal that a Kerberos ticket cache is of.

    The format is MIT Kerberos's credential cache file, version 4.

    Raises
    ------
    StoreError
        If it cannot be read.
    """
    path = ticket_cache.removeprefix("FILE:")
    try:
        content = Path(path).read_bytes()
        version, header = struct.unpack_from(">HH", content)
        if version != 0x0504:
            raise ValueError(f"version {version:#06x} of the format")
        position = 4 + header
        _, count = struct.unpack_from(">II", content, position)
        position += 8
        texts = []
        for _ in range(count + 1):
            (length,) = struct.unpack_from(">I", content, position)
            texts.append(content[position + 4 : position + 4 + length].decode())
            position += 4 + length
    except (OSError, ValueError, struct.error) as error:
        raise StoreError(
            f"kerb_ticket: {ticket_cache!r} cannot be read as a Kerberos ticket cache ({error}). "
            "Set a file that `kinit -c` has written, of the same path on the driver and on all "
            "executors."
        ) from error
    realm, *names = texts
    return f"{'/'.join(names)}@{realm}"
