"""Store without local paths that logs every request, from any process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hvd_estimators.store import FilesystemStore


class CountedFileSystem(LocalFileSystem):
    """Local files under another scheme, so that PyArrow does not open them itself."""

    protocol = "counted"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("counted://")))

    def unstrip_protocol(self, name: str) -> str:
        return f"counted://{self._strip_protocol(name)}"

    def _note(self, what: str) -> None:
        log = os.open(self.storage_options["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{what}\n".encode())
        os.close(log)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        data = Path(self._strip_protocol(path)).read_bytes()
        found = data[start:end]
        self._note(f"get {Path(path).name} {start} {len(found)}")
        return found

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        assert mode != "rb", "a file is opened, and not read in ranges"
        return super().open(path, mode, **kwargs)


class CountedStore(FilesystemStore):
    """Store that registers its filesystem in each process that opens it."""

    def _opened(self, path: str) -> Any:
        fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
        return super()._opened(path)

    def _takes_suffixes(self) -> bool:
        return True

    def local(self, path: str) -> str:
        """Return the local path of a file."""
        return str(self.fs._strip_protocol(path))


class Requests:
    """Requests made so far."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def take(self) -> list[tuple[str, int, int]]:
        """Return the file, first byte and byte count of each request, and clear the log."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        found = [line.split() for line in lines]
        return [(name, int(start), int(size)) for _, name, start, size in found]


def make_store(folder: Path) -> tuple[CountedStore, Requests]:
    """Return a store of local files and its request log."""
    log = folder / "requests"
    return CountedStore(f"counted://{folder}/store", storage_options={"log": str(log)}), Requests(
        log
    )
