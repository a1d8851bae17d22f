"""Registry of store classes by URL scheme. Other packages can register their own classes."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from typing import Any

from hvd_estimators._util.install_hints import AZURE, GCS, OCI, OSS, S3A, Connector
from hvd_estimators.exceptions import ParamError
from hvd_estimators.store.redaction import redacted

_LOCAL = "hvd_estimators.store.local:LocalStore"
_FILESYSTEM = "hvd_estimators.store.filesystem:FilesystemStore"
_HDFS = "hvd_estimators.store.hdfs:HDFSStore"


@dataclass(frozen=True)
class Scheme:
    """Facts about URLs of a scheme, for Python and Spark.

    Attributes
    ----------
    store : str
        Location of the store's class: its module is imported on demand.
    client : str
        Package of the filesystem, for an object store. Empty for others.
    connector : Connector or None
        Spark's connector.
    renames_by_copy : bool
        Whether Hadoop renames a file by copying it.
    reads_ends : bool
        Whether a request can ask for the last bytes of a file.
    """

    store: str = _FILESYSTEM
    client: str = ""
    connector: Connector | None = None
    renames_by_copy: bool = False
    reads_ends: bool = False

    @property
    def is_object_store(self) -> bool:
        """True for a store without folders, on which making one may make a bucket."""
        return bool(self.client)


_S3 = Scheme(client="s3fs", connector=S3A, renames_by_copy=True, reads_ends=True)
_AZURE = Scheme(client="adlfs", connector=AZURE)

SCHEMES = {
    "": Scheme(_LOCAL),
    "file": Scheme(_LOCAL),
    "hdfs": Scheme(_HDFS),
    "viewfs": Scheme(_HDFS),
    "s3": _S3,
    "s3a": _S3,
    "gs": Scheme(client="gcsfs", connector=GCS, renames_by_copy=True, reads_ends=True),
    "gcs": Scheme(client="gcsfs", reads_ends=True),
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": Scheme(client="adlfs"),
    "oci": Scheme(client="ocifs", connector=OCI),
    "oss": Scheme(client="ossfs", connector=OSS, renames_by_copy=True),
    # Local to one process, so training on it is rejected later.
    "memory": Scheme(reads_ends=True),
}
"""The schemes that both fsspec and Spark know."""

_OTHER = Scheme()

_stores: dict[str, type[Any] | str] = {name: scheme.store for name, scheme in SCHEMES.items()}

_databricks: dict[str, type[Any] | str] = {
    "dbfs": "hvd_estimators.store.local:DBFSLocalStore",
    "volumes": "hvd_estimators.store.local:VolumesStore",
}
"""Stores that exist only on Databricks."""

_DBFS = re.compile(r"(?:dbfs:(?=/(?!/|Volumes/))|(?:file:(?://)?)?/dbfs(?=/|$))(.*)", re.DOTALL)


def register_store(scheme: str, store: type[Any] | str) -> None:
    """Register a store class for a URL scheme, for use by `Store.create`.

    Runs on the driver. Ranks need no registration because they receive the store object.

    Parameters
    ----------
    scheme : str
        The part of a URL before the colon, such as ``s3``. Replaces an earlier registration of the
        scheme.
    store : type or str
        A subclass of `Store`, or its location as ``"package.module:Class"``. `FilesystemStore`
        supports every filesystem that fsspec knows and Spark writes to.

    Raises
    ------
    ParamError
        If ``scheme`` is not a non-empty string, or if ``store`` is neither a class nor a string.
    """
    name: Any = scheme
    if not isinstance(name, str) or not name:
        raise ParamError(
            f"scheme: expected the part of a URL before the colon, such as 's3', found {scheme!r}."
        )
    if not isinstance(store, (type, str)):
        raise ParamError(
            "store: expected a subclass of Store, or its location, such as "
            f"'package.module:Class', found {store!r}."
        )
    _stores[scheme.lower()] = store


def require_path(name: str, path: Any) -> None:
    """Check that a path is a string or None.

    Raises
    ------
    ParamError
        If it is anything else.
    """
    if path is not None and not isinstance(path, str):
        raise ParamError(
            f"expected a path or a URL as a string, found {path!r}. Set str(path).", param=name
        )


def registered_schemes() -> list[str]:
    """Return all registered schemes, sorted."""
    return sorted(filter(None, _stores))


def scheme_of(path: str) -> str:
    """Return the scheme of a path in lower case; empty for a path without a scheme.

    A single letter is a drive, not a scheme. ``file:/data`` has a scheme although it has one slash.
    For a chain (``simplecache::s3://…``), the first scheme is returned.
    """
    match = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+)(?:::|:/)", path)
    return match[1].lower() if match else ""


def facts(path: str) -> Scheme:
    """Return the facts about the scheme of a path."""
    return SCHEMES.get(scheme_of(path), _OTHER)


def store_class(path: str) -> type[Any]:
    """Return the store class for a path.

    Raises
    ------
    ParamError
        If no store class is registered for the path's scheme.
    """
    require_path("prefix_path", path or "")
    scheme = scheme_of(path or "")
    key = _databricks_key(path or "") if "DATABRICKS_RUNTIME_VERSION" in os.environ else None
    if key is not None:
        return _class(_databricks, key)
    if scheme not in _stores:
        raise ParamError(
            f"no store for the scheme {scheme!r}, found {redacted(path)!r}. Set a path without a "
            f"scheme or with one of: {', '.join(registered_schemes())}. For another filesystem of "
            "fsspec, which the driver, all executors and Spark write to, call "
            f"hvd_estimators.store.register_store({scheme!r}, FilesystemStore) first.",
            param="prefix_path",
        )
    return _class(_stores, scheme)


def dbfs_path(path: str) -> str | None:
    """Return the absolute path within DBFS, or None if ``path`` is not a DBFS path."""
    match = _DBFS.fullmatch(path)
    return match[1] or "/" if match else None


def _databricks_key(path: str) -> str | None:
    if dbfs_path(path) is not None:
        return "dbfs"
    return "volumes" if path.removeprefix("dbfs:").startswith("/Volumes/") else None


def _class(stores: dict[str, type[Any] | str], key: str) -> type[Any]:
    store = stores[key]
    if isinstance(store, str):
        module, _, name = store.partition(":")
        store = stores[key] = getattr(importlib.import_module(module), name)
    return store
