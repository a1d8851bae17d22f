"""Store on HDFS or viewfs that needs no JVM on the ranks."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import shutil
import threading
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.store.files import CHUNK_BYTES
from hvd_estimators.store.filesystem import FilesystemStore
from hvd_estimators.store.registry import scheme_of

_SCHEMES = ("hdfs", "viewfs")

_PROCESSES = uuid.uuid4().hex
"""Distinguishes this process, and those that it forks, from processes of other machines."""
_CARRIED = re.compile(
    r"dfs\.|fs\.(defaultFS|viewfs\.)|hadoop\.(rpc\.protection|security\.(auth|token))"
)
"""Hadoop settings that ranks need. The pattern excludes possible secrets of other components."""


class HDFSStore(FilesystemStore):
    """Store on HDFS.

    The Python side (driver and ranks) uses ``hdfs-native``, so it needs neither a JVM nor Hadoop's
    libraries. Spark writes with its own client. If a path names no name node, or names a name
    service, both use Hadoop's configuration (``HADOOP_CONF_DIR``, or ``HADOOP_HOME/etc/hadoop``).
    The store object carries the required settings, ``user`` and ``kerb_ticket`` to the ranks, so
    executors need no configuration.

    Spark's JVMs write as the user that they run as (``HADOOP_USER_NAME``, ``spark.kerberos.*``).
    Give that user and ``user`` access to the same paths.

    Parameters
    ----------
    prefix_path : str, optional
        ``hdfs://host:port/path``, ``hdfs://nameservice/path``, ``viewfs://…`` or ``/path``. With
        ``hdfs:///path`` and ``hdfs:/path``, Hadoop's configuration determines the name node.
        Optional if ``train_path`` and ``runs_path`` are given.
    host : str, optional
        The name node for paths that name none. ``"default"`` means the one in Hadoop's
        configuration.
    port : int, optional
        Port of the name node. If 0 or None, ``host`` is a name service.
    user : str, optional
        User that reads and writes. Default: ``HADOOP_USER_NAME``, or the user of the process. A
        process can have only one user, because hdfs-native reads it from ``HADOOP_USER_NAME``. The
        store sets this variable on the driver, in the ranks and in Spark's Python workers. With
        Kerberos, the principal whose ticket is used.
    kerb_ticket : str, optional
        Path of a Kerberos ticket cache file that exists on the driver and on all executors, with
        tickets of ``user``. Default: the ticket cache of the process.
    driver : str
        Has no effect: libhdfs is not used.
    extra_conf : dict, optional
        Additional Hadoop settings for the Python side.
    train_path, val_path, test_path, runs_path, save_runs, storage_options, checkpoint_filename
        See `Store`. Storage options are also Hadoop settings. Set secret settings there.

    Attributes
    ----------
    user, kerb_ticket
        As given.
    settings : dict
        Hadoop settings for the Python side.

    Raises
    ------
    ParamError
        If a path is not an HDFS path.
    DependencyError
        If ``hdfs-native`` is not installed.
    """

    def __init__(
        self,
        prefix_path: str | None = None,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            warnings.warn(
                f"driver: {driver!r} has no effect, HDFS is read by hdfs-native.", stacklevel=2
            )
        if user is not None and not re.fullmatch(r"[\w.@/$-]+", user):
            raise ParamError(f"user: expected a name or a Kerberos principal, found {user!r}.")
        if kerb_ticket is not None and user is None:
            raise ParamError(
                f"user: expected the principal of kerb_ticket={kerb_ticket!r}, found None. Set "
                "user='name@REALM', as `klist` shows it."
            )
        self.user = user
        self.kerb_ticket = kerb_ticket
        # Read the settings here, because executors may have no Hadoop configuration.
        self.settings = {**hadoop_settings(), **(extra_conf or {})}
        self._host = ""
        if host and host != "default":
            self._host = f"{host}:{int(port)}" if port else host
        self._root: tuple[str, str] | None = None  # scheme and authority, from the first path
        super().__init__(prefix_path, *args, **kwargs)

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The filesystem, with the store's user, ticket cache and settings."""
        try:
            from hvd_estimators.store.hdfs_client import ConfiguredHdfs
        except ImportError as error:
            raise DependencyError(
                f"HDFS is read by hdfs-native ({error}). Run on the driver and on all executors: "
                f"{INSTALL['hdfs_native']}"
            ) from error
        scheme, authority = self._root or ("hdfs", "")
        if not authority:
            raise ParamError(
                f"The store knows no name node for {self!r}, since Hadoop's configuration names "
                "none. Set hdfs://host:port/path, or HADOOP_CONF_DIR to the folder of "
                "core-site.xml."
            )
        options = {key: str(value) for key, value in self.storage_options.items()}
        config = {**self.settings, **options}
        return ConfiguredHdfs(f"{scheme}://{authority}", config, self.user, self.kerb_ticket)

    def get_full_path(self, path: str) -> str:
        """Return a URL with the name node or name service, if one is known.

        Raises
        ------
        ParamError
            If the path is not on this HDFS.
        """
        self._check_path(path)
        scheme = scheme_of(path)
        if scheme not in ("", *_SCHEMES):
            raise ParamError(
                f"expected a path on HDFS, found {path!r}. Set hdfs://host:port/path.",
                param="prefix_path",
            )
        parts = urlsplit(path, allow_fragments=False)
        authority, path_in_fs = (parts.netloc, parts.path) if scheme else ("", path)
        if "@" in authority:
            user, _, host = authority.rpartition("@")
            raise ParamError(
                f"found {path!r}. Set {scheme}://{host}{path_in_fs} and user={user!r}."
            )
        if not path_in_fs.startswith("/"):
            raise ParamError(
                f"expected a path on HDFS that begins at its root, found {path!r}. "
                "Set hdfs://host:port/path.",
                param="prefix_path",
            )
        if self._root is None:
            default = urlsplit(self.settings.get("fs.defaultFS", ""))
            if not scheme:
                scheme = "hdfs" if self._host or default.scheme not in _SCHEMES else default.scheme
            by_default = default.netloc if default.scheme == scheme else ""
            self._root = scheme, authority or self._host or by_default
        elif scheme not in ("", self._root[0]) or authority not in ("", self._root[1]):
            raise ParamError(
                f"found {path!r}, which is on another filesystem than {self._base!r}. Set all "
                "paths of a store on one."
            )
        return self.full_path("/" + path_in_fs.strip("/"))

    def full_path(self, listed: str) -> str:
        """Return the URL of a path that the filesystem has listed."""
        return self._base + listed

    def local_path(self, path: str) -> str | None:
        """Return None, because the operating system cannot open HDFS files."""
        return None

    def check(self) -> None:
        """Check the ticket cache and write access; see `Store.check`."""
        ticket = self.kerb_ticket
        if ticket is not None and not os.path.exists(ticket.removeprefix("FILE:")):
            raise ParamError(
                f"kerb_ticket: found no ticket cache {ticket!r}. Set a file that `kinit -c` has "
                "written, of the same path on the driver and on all executors."
            )
        super().check()

    def _create(self, path: str, content: bytes) -> None:
        self._write_and_rename(io.BytesIO(content), path, overwrite=False)

    def _upload(self, local: str, path: str) -> None:
        with open(local, "rb") as source:
            self._write_and_rename(source, path, overwrite=True)

    def _write_and_rename(self, source: IO[bytes], path: str, *, overwrite: bool) -> None:
        """Write a temporary file next to the target and rename it, which is atomic on HDFS."""
        target, fs = self._path_in_fs(path), self.fs
        # The same file for all attempts and later writes of this thread: each replaces what the one
        # before has left, for example because no name node answered any more.
        writer = f"{_PROCESSES}-{os.getpid()}-{threading.get_ident()}"
        partial = posixpath.join(
            posixpath.dirname(target), f".{posixpath.basename(target)}-{writer}"
        )
        try:
            with fs.open(partial, "wb") as copy:
                shutil.copyfileobj(source, copy, CHUNK_BYTES)
            fs.mv(partial, target, overwrite=overwrite)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(partial)
            raise

    def _opened(self, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
        return self.fs, self._path_in_fs(path)

    def _path_in_fs(self, path: str) -> str:
        return path.removeprefix(self._base) or "/"

    @property
    def _base(self) -> str:
        return "{}://{}".format(*(self._root or ("hdfs", "")))


def hadoop_settings() -> dict[str, str]:
    """Return the settings in this machine's Hadoop configuration that HDFS clients need.

    The settings come from ``core-site.xml`` and ``hdfs-site.xml`` in ``HADOOP_CONF_DIR`` or
    ``HADOOP_HOME/etc/hadoop``. The result is empty if neither folder is configured.
    """
    from xml.etree import ElementTree

    folder = os.environ.get("HADOOP_CONF_DIR")
    if not folder and os.environ.get("HADOOP_HOME"):
        folder = os.path.join(os.environ["HADOOP_HOME"], "etc", "hadoop")
    settings: dict[str, str] = {}
    for name in ("core-site.xml", "hdfs-site.xml"):
        path = Path(folder or "", name)
        if not folder or not path.is_file():
            continue
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError as error:
            raise ParamError(
                f"HADOOP_CONF_DIR: {str(path)!r} is not valid XML ({error})."
            ) from error
        for item in root.iter("property"):
            key = (item.findtext("name") or "").strip()
            if _CARRIED.match(key):
                settings[key] = (item.findtext("value") or "").strip()
    return settings
