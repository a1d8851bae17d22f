"""What a predictor is made of: bytes, or a file of this machine. Imports no PySpark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Union

from hvd_estimators.temporary import LocalFile

__all__ = ["Document", "as_bytes", "chunks", "size_of"]

Document = Union[bytes, "os.PathLike[str]"]
"""What a predictor is made of: bytes, or a file that holds them."""


def as_bytes(document: bytes | os.PathLike[str]) -> bytes:
    """Return the bytes of a document that may be a file."""
    return document if isinstance(document, bytes) else Path(document).read_bytes()


def size_of(document: bytes | LocalFile) -> int:
    """Return how many bytes a document has."""
    return len(document) if isinstance(document, bytes) else os.path.getsize(document)


def chunks(document: bytes | LocalFile, size: int) -> Iterator[bytes | memoryview]:
    """Yield a document in pieces of a size."""
    if isinstance(document, bytes):
        view = memoryview(document)
        yield from (view[start : start + size] for start in range(0, len(view), size))
        return
    with open(document, "rb") as file:
        while piece := file.read(size):
            yield piece
