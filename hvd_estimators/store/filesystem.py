"""Store on any fsspec filesystem, with paths that keep their scheme."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

import fsspec

from hvd_estimators._util.install_hints import INSTALL
from hvd_estimators._util.temp_files import folder_prefix
from hvd_estimators.exceptions import DependencyError, ParamError
from hvd_estimators.store.base import Store
from hvd_estimators.store.registry import SCHEMES, facts, scheme_of
from hvd_estimators.store.retries import typed_errors

_AZURE = ("abfs", "abfss", "az")

_AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"

_ACCOUNT = re.compile(r"(?:abfss?|az)://[^/@]+@([^/]+)")


class FilesystemStore(Store):
    """Store under a URL that fsspec opens and Spark writes to.

    Paths are full URLs with fsspec's scheme. Override `spark_url` in a subclass if Spark spells
    URLs differently. Override `open_atomic` if the storage offers a better way to replace files.
    See `Store` for the parameters.
    """

    _first_path: str | None = None
    """Determines the filesystem and its scheme in Spark."""

    @property
    def fs(self) -> fsspec.AbstractFileSystem:
        """The filesystem of the store's paths, with its ``storage_options``."""
        assert self._first_path is not None
        return self._opened(self._first_path)[0]

    def get_full_path(self, path: str) -> str:
        """Return a URL in fsspec's form, without a trailing slash.

        Raises
        ------
        ParamError
            If fsspec does not know the scheme or would interpret the path as a pattern. Also if the
            path is on another filesystem than the prefix.
        DependencyError
            If a package that fsspec needs is not installed.
        """
        self._check_path(path)
        if self._first_path is None:
            self._first_path = path
        try:
            fs, path_in_fs = self._opened(path)
        except ImportError as error:
            raise _not_installed(path, error) from error
        except ValueError as error:
            package = facts(path).client
            if package and importlib.util.find_spec(package) is None:
                raise _not_installed(path, error) from error
            raise ParamError(f"The store cannot open {path!r}: {error}.") from error
        account = _ACCOUNT.match(path)
        if fs.protocol != self.fs.protocol or (account and account[1] != self._azure_host()):
            raise ParamError(
                f"found {path!r}, which is on another filesystem than {self._first_path!r}. Set "
                "all paths of a store on one."
            )
        return self.full_path(path_in_fs).rstrip("/")

    def full_path(self, listed: str) -> str:
        """Return the URL of a path that the filesystem has listed."""
        return str(self.fs.unstrip_protocol(listed))

    def local_path(self, path: str) -> str | None:
        """Return the operating system's path, or None if the files are remote."""
        fs, path_in_fs = self._opened(path)
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        return path_in_fs if "file" in protocols else None

    def spark_url(self, path: str) -> str:
        """Return the path in the form that Hadoop's connectors know.

        If the store was created with ``s3a://``, that scheme is used. ``az://`` becomes
        ``abfss://`` with the account name. All other paths are returned unchanged.

        Raises
        ------
        ParamError
            If no other process can access this filesystem.
        """
        self._check_shared()
        scheme, rest = path.split("://", 1)
        if scheme in _AZURE:
            return self._azure_url(rest)
        is_s3a = scheme == "s3" and scheme_of(self._first_path or "") == "s3a"
        return f"s3a://{rest}" if is_s3a else path

    def spark_urls(self, path: str) -> Sequence[str]:
        """Return the result of `spark_url`, and for S3 also its other scheme.

        All Spark distributions except Amazon's know S3 as ``s3a``.
        """
        url = self.spark_url(path)
        scheme, _, rest = url.partition("://")
        other_scheme = {"s3": "s3a", "s3a": "s3"}.get(scheme)
        return (url,) if other_scheme is None else (url, f"{other_scheme}://{rest}")

    def check(self) -> None:
        """Check that the prefix is shared and writable; see `Store.check`."""
        self._check_shared()
        super().check()

    def _takes_suffixes(self) -> bool:
        protocols = self.fs.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        return any(SCHEMES[name].reads_ends for name in names & SCHEMES.keys())

    @contextlib.contextmanager
    def open_atomic(self, path: str) -> Iterator[IO[bytes]]:
        """Write to a local file and upload it when the block succeeds.

        An object store makes the object visible only after a complete upload. The old content stays
        visible until then, and also if the upload fails. Other filesystems may briefly show a
        partial file, unless a subclass overrides this method.
        """
        temporary = tempfile.gettempdir()
        description = f"writing {path!r} to a temporary file first, in {temporary!r} (set TMPDIR)"
        # Closing a file fails again if its disk is full; the folder is deleted nevertheless.
        with (
            typed_errors(description),
            tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder,
            open(os.path.join(folder, "content"), "w+b") as file,
        ):
            yield file
            file.flush()
            self._retried(lambda: self._upload(file.name, path), f"writing {path!r}")

    def _create(self, path: str, content: bytes) -> None:
        self._make_parent(path)
        super()._create(path, content)

    def _upload(self, local: str, path: str) -> None:
        """Upload a local file to the store. Called again after a failure."""
        self._make_parent(path)
        self.fs.put_file(local, path)

    def _make_parent(self, path: str) -> None:
        if not facts(path).is_object_store:
            self.fs.makedirs(posixpath.dirname(path), exist_ok=True)

    def delete_empty(self, path: str) -> None:
        """Delete a directory if it is empty; do nothing on object stores, which have none."""
        if not facts(path).is_object_store:
            super().delete_empty(path)

    def _opened(self, path: str) -> tuple[fsspec.AbstractFileSystem, str]:
        fs, path_in_fs = fsspec.core.url_to_fs(path, **self._options(path))
        return fs, str(path_in_fs)

    def _path_in_fs(self, path: str) -> str:
        return self._opened(path)[1]

    def _check_path(self, path: str) -> None:
        if "::" in path:
            raise ParamError(
                f"The store cannot use {path!r}: a chain of filesystems. Set the URL of the last "
                "one, on storage that the driver and all executors share."
            )
        if any(character in path for character in "*?["):
            raise ParamError(
                f"The store cannot use {path!r}: fsspec takes '*', '?' and '[' for patterns, so "
                "that it would delete other files. Set a path without them."
            )

    def url(self, path: str) -> str:
        """Return the URL by which other Python packages open a path; see `Store.url`."""
        scheme, _, rest = path.partition("://")
        return self._azure_url(rest) if scheme in _AZURE else super().url(path)

    def _azure_url(self, rest: str) -> str:
        """Return the URL with the account name that Hadoop's Azure connector expects."""
        container, _, path = rest.partition("/")
        host = self._azure_host()
        if host is None:
            raise ParamError(
                f"store: Spark needs the name of the account for {self.folder!r}. Set "
                "abfss://container@account.dfs.core.windows.net/path, or account_name in "
                "storage_options."
            )
        return f"abfss://{container}@{host}/{path}"

    def _azure_host(self) -> str | None:
        match = _ACCOUNT.match(self._first_path or "")
        if match:
            return match[1]
        name = self.storage_options.get("account_name", os.environ.get(_AZURE_ACCOUNT))
        return f"{name}.dfs.core.windows.net" if name else None

    def _options(self, path: str) -> dict[str, Any]:
        """Return the options of the filesystem, including the account from the first path."""
        options = dict(self.storage_options)
        host = self._azure_host() if scheme_of(path) in _AZURE else None
        if host is not None and "connection_string" not in options:
            options.setdefault("account_name", host.partition(".")[0])
        return options

    def _check_shared(self) -> None:
        if self.folder.startswith("memory:"):
            raise ParamError(
                f"store: found {self.folder!r}, which is in the memory of this process alone: "
                "neither Spark nor the ranks see it. Set a prefix on storage that the driver and "
                "all executors share."
            )


def _not_installed(path: str, error: Exception) -> DependencyError:
    package = facts(path).client
    remedy = INSTALL.get(package, "Install that package")
    run = f"Run: {remedy}" if package in INSTALL else remedy
    return DependencyError(
        f"The store cannot open {path!r}: {error}. {run}, on the driver and on all executors."
    )
