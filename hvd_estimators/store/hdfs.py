"""A store on HDFS, or on what viewfs mounts of it, that needs no JVM in the ranks."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

import fsspec

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.store.filesystem import FilesystemStore
from hvd_estimators.store.hashing import CHUNK_BYTES
from hvd_estimators.store.registry import scheme_of

__all__ = ["HDFSStore", "hadoop_settings"]

_SCHEMES = ("hdfs", "viewfs")
_READ_BUFFER = 2**18
_CARRIED = re.compile(
    r"dfs\.|fs\.(defaultFS|viewfs\.)|hadoop\.(rpc\.protection|security\.(auth|token))"
)
"""What ranks need of Hadoop's configuration, and nothing that may be a secret of something else."""


class HDFSStore(FilesystemStore):
    """Keeps everything on HDFS.

    The Python side (this process and the ranks) goes by ``hdfs-native``, so that it needs neither a
    JVM nor Hadoop's libraries; Spark writes by its own client. Both find the name nodes by Hadoop's
    configuration (``HADOOP_CONF_DIR``, or ``HADOOP_HOME/etc/hadoop``) where a path names none, or a
    name service. What the ranks need of it travels in the store, and so do ``user`` and
    ``kerb_ticket``: executors need no configuration.

    Spark's JVMs write as the user that they run as (``HADOOP_USER_NAME``, ``spark.kerberos.*``):
    give that one and ``user`` access to the same paths.

    Parameters
    ----------
    prefix_path : str, optional
        ``hdfs://host:port/path``, ``hdfs://nameservice/path``, ``hdfs:///path`` or ``hdfs:/path``
        (by Hadoop's configuration), ``viewfs://…``, or ``/path``. May be left out where
        ``train_path`` and ``runs_path`` are given.
    host : str, optional
        The name node, where paths name none; ``"default"``: by Hadoop's configuration.
    port : int, optional
        Its port; 0 and None: none, so that ``host`` is a name service.
    user : str, optional
        Who reads and writes; default: ``HADOOP_USER_NAME``, or the user of the process. It is one
        for all of a process: hdfs-native takes it from ``HADOOP_USER_NAME``, which the store sets
        on the driver, in the ranks and in Spark's Python workers. With Kerberos a principal, whose
        ticket is taken.
    kerb_ticket : str, optional
        A Kerberos ticket cache, a file that is there on the driver and on all executors. Default:
        the process's own.
    driver : str
        Has no effect: libhdfs is not used.
    extra_conf : dict, optional
        Further settings of Hadoop, for the Python side.
    train_path, val_path, test_path, runs_path, save_runs, storage_options, checkpoint_filename
        See `Store`. Storage options are settings of Hadoop, too; those that are secrets belong
        there.

    Attributes
    ----------
    user, kerb_ticket
        As given.
    settings : dict
        Hadoop's settings for the Python side.

    Raises
    ------
    ParamError
        If a path is not HDFS's.
    DependencyError
        If ``hdfs-native`` is not installed.
    """

    creates_exclusively = True

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
        self.user = user
        self.kerb_ticket = kerb_ticket
        # Read where the store is made: executors may have none.
        self.settings = {**hadoop_settings(), **(extra_conf or {})}
        self._host = ""
        if host and host != "default":
            self._host = f"{host}:{int(port)}" if port else host
        self._root: tuple[str, str] | None = None  # scheme and authority, by the first path
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
            If it is no path on this HDFS.
        """
        self._check_path(path)
        scheme = scheme_of(path)
        if scheme not in ("", *_SCHEMES):
            raise ParamError(
                f"prefix_path: expected a path on HDFS, found {path!r}. Set hdfs://host:port/path."
            )
        authority, path_in_fs = "", path
        if scheme:
            rest = path.split(":", 1)[1]
            if rest.startswith("//"):
                authority, slash, path_in_fs = rest[2:].partition("/")
                path_in_fs = slash + path_in_fs
            else:
                path_in_fs = rest
        if "@" in authority:
            user, _, host = authority.rpartition("@")
            raise ParamError(
                f"found {path!r}. Set {scheme}://{host}{path_in_fs} and user={user!r}."
            )
        if not path_in_fs.startswith("/"):
            raise ParamError(
                "prefix_path: expected a path on HDFS that begins at its root, found "
                f"{path!r}. Set hdfs://host:port/path."
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
        """Return the URL of what the filesystem lists."""
        return self._base + listed

    def local_path(self, path: str) -> str | None:
        """Return None: no file of HDFS is one of the operating system's."""
        return None

    def open(self, path: str) -> IO[bytes]:
        """Open a file for reading, which reads on after an error; see `Store.open`."""
        # Each read is a request to a data node.
        raw: Any = super().open(path)
        return cast("IO[bytes]", io.BufferedReader(raw, _READ_BUFFER))

    def check(self) -> None:
        """Make sure that the ticket cache is there, and the rest; see `Store.check`."""
        ticket = self.kerb_ticket
        if ticket is not None and not os.path.exists(ticket.removeprefix("FILE:")):
            raise ParamError(
                f"kerb_ticket: there is no ticket cache {ticket!r}. Set a file that `kinit -c` has "
                "written, of the same path on the driver and on all executors."
            )
        super().check()

    def write_new(self, path: str, text: str) -> bool:
        """Write a file, whole, if there is none; of several processes one alone succeeds."""
        with tempfile.NamedTemporaryFile(prefix="hvd_estimators-") as file:
            file.write(text.encode())
            file.flush()
            try:
                self.fs.makedirs(posixpath.dirname(self._path_in_fs(path)), exist_ok=True)
                self._upload(file.name, path, overwrite=False)
            except Exception:
                if self.exists(path):
                    return False
                raise
        return True

    def _upload(self, local: str, path: str, overwrite: bool = True) -> None:
        """Write beside the file and rename onto it, which is one step on HDFS."""
        fs, target = self.fs, self._path_in_fs(path)
        partial = posixpath.join(
            posixpath.dirname(target), f".{posixpath.basename(target)}-{uuid.uuid4().hex}"
        )
        try:
            with open(local, "rb") as source, fs.open(partial, "wb") as copy:
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
    """Return what HDFS's clients need of Hadoop's configuration on this machine.

    Of ``core-site.xml`` and ``hdfs-site.xml`` in ``HADOOP_CONF_DIR``, or in
    ``HADOOP_HOME/etc/hadoop``; nothing where there are none.
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
                f"HADOOP_CONF_DIR: {str(path)!r} is no valid XML ({error})."
            ) from error
        for item in root.iter("property"):
            key = (item.findtext("name") or "").strip()
            if _CARRIED.match(key):
                settings[key] = (item.findtext("value") or "").strip()
    return settings
