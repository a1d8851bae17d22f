"""Store that all processes of this machine can open but that is not a local directory."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import fsspec

from hvd_estimators.store import FilesystemStore


def register_remote() -> None:
    """Register a filesystem with fsspec: local files under URLs of another scheme.

    It requires an option, as a remote filesystem requires a key. Each process defines the class,
    since classes of fsspec's filesystems cannot be sent to a process.
    """
    from fsspec.implementations.local import LocalFileSystem

    class RemoteFileSystem(LocalFileSystem):
        protocol = "remote"

        def __init__(self, key: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            assert key == "right", "the store's options are missing"

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            return str(LocalFileSystem._strip_protocol(str(path).removeprefix("remote://")))

        def unstrip_protocol(self, name: str) -> str:
            return f"remote://{self._strip_protocol(name)}"

    fsspec.register_implementation("remote", RemoteFileSystem, clobber=True)


class RemoteStore(FilesystemStore):
    """Store that registers its filesystem in each process that opens it."""

    def _opened(self, path: str) -> Any:
        if "remote" not in fsspec.registry:
            register_remote()
        return super()._opened(path)


def make_store(folder: Any) -> RemoteStore:
    # Ranks cannot import the tests.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return RemoteStore(f"remote://{folder}", storage_options={"key": "right"})
