"""Store that all processes of this machine can open but that is not a local directory."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import fsspec

from hvd_estimators.store import FilesystemStore, register_store


def register_remote(scheme: str, expected_key: str) -> None:
    """Register a filesystem with fsspec: local files under URLs of another scheme.

    It requires an option, as a remote filesystem requires a key. Each process defines the class,
    since classes of fsspec's filesystems cannot be sent to a process.
    """
    from fsspec.implementations.local import LocalFileSystem

    class RemoteFileSystem(LocalFileSystem):
        protocol = scheme

        def __init__(self, key: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            assert key == expected_key, "the store's options are missing"

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return str(LocalFileSystem._strip_protocol(str(path).removeprefix(f"{scheme}://")))

        def unstrip_protocol(self, name: str) -> str:
            return f"{scheme}://{self._strip_protocol(name)}"

    fsspec.register_implementation(scheme, RemoteFileSystem, clobber=True)


class OpenStore(FilesystemStore):
    """Store on a filesystem that requires no option, of URLs such as ``open:///folder``."""

    def _opened(self, path: str) -> Any:
        if "open" not in fsspec.registry:
            register_remote("open", "")
        return super()._opened(path)


def register_open_store() -> None:
    """Let `Store.create` know the scheme ``open``."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    register_store("open", OpenStore)
