"""Footers of Parquet files in a store that only requests reach, each read once by those who share.

Runs on both sides.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.parquet.arrow_types import num_leaves
from hvd_estimators.parquet.fetching import Range
from hvd_estimators.store.base import Store

__all__ = ["TAIL_BYTES", "FileFooter", "Footers", "leaf_positions", "read_tail"]

TAIL_BYTES = 2**16
"""What is fetched of a file's end to have its footer; a longer footer takes a second request."""

_MAGIC_BYTES = 8
"""What follows a footer: its length and four letters."""

_PARSED = 64
"""Footers that are held parsed; many times the memory of those that are not."""

_UNPARSED_BYTES = 2**26
"""Bytes of footers that are held; further ones are read again when they are needed."""


def read_tail(store: Store, path: str) -> bytes:
    """Return the end of a file, from the beginning of its footer on if it is Parquet.

    One request, or two where the footer has more than `TAIL_BYTES`.
    """
    (tail,) = store.read_ranges(path, [(-TAIL_BYTES, None)])
    length = int.from_bytes(tail[-_MAGIC_BYTES:-4], "little") + _MAGIC_BYTES
    if not tail.endswith(b"PAR1") or length <= len(tail):
        return tail[-length:]
    if len(tail) == TAIL_BYTES:
        (tail,) = store.read_ranges(path, [(-length, None)])
    return tail


def leaf_positions(schema: pa.Schema) -> dict[str, range]:
    """Return the positions of the Parquet columns that hold each column."""
    # By position, not by path: a field b of a struct a has the same path as a column a.b, and the
    # paths below a list differ from writer to writer.
    leaves, start = {}, 0
    for field in schema:
        leaves[field.name] = range(start, start + num_leaves(field.type))
        start = leaves[field.name].stop
    return leaves


def _chunk_ranges(metadata: Any, row_group: int, positions: Iterable[int]) -> list[Range]:
    """Return where the chunks of some Parquet columns lie, in the order of the file.

    Parameters
    ----------
    metadata : pyarrow.parquet.FileMetaData
        The footer.
    row_group : int
        Position of the row group.
    positions : iterable of int
        Of the Parquet columns.
    """
    group = metadata.row_group(row_group)
    ranges = []
    for position in sorted(set(positions)):
        chunk = group.column(position)
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        ranges.append((start, start + chunk.total_compressed_size))
    return sorted(ranges)


@dataclass(frozen=True)
class FileFooter:
    """A file's footer.

    Attributes
    ----------
    metadata : pyarrow.parquet.FileMetaData
        The footer itself.
    leaves : mapping of str to range
        See `leaf_positions`.
    end : int
        Where the file ends, or somewhat before that.
    """

    metadata: parquet.FileMetaData
    leaves: Mapping[str, range]
    end: int

    @staticmethod
    def of(tail: bytes) -> FileFooter:
        """Parse the end of a file."""
        metadata = parquet.read_metadata(pa.BufferReader(tail))
        columns = range(metadata.num_columns)
        groups = (_chunk_ranges(metadata, i, columns) for i in range(metadata.num_row_groups))
        end = max((group[-1][1] for group in groups if group), default=0)
        leaves = leaf_positions(metadata.schema.to_arrow_schema())
        return FileFooter(metadata, leaves, end + len(tail))

    def chunks(self, row_group: int, names: Iterable[str]) -> list[Range]:
        """Return where the columns of these names lie in a row group, in the order of the file."""
        positions = [position for name in names for position in self.leaves.get(name, ())]
        return _chunk_ranges(self.metadata, row_group, positions)


class Footers:
    """The footers of a store's files, each read once, whoever asks, and when.

    They are held for as long as a run may need them: a few parsed, the others as they are stored,
    64 MiB of those.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._parsed: OrderedDict[str, FileFooter] = OrderedDict()
        self._tails: OrderedDict[str, bytes] = OrderedDict()
        self._tail_bytes = 0
        self._reading: dict[str, Future[bytes]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads for itself, or is told by `add`.
        return Footers, (self._store,)

    def get(self, path: str) -> FileFooter:
        """Return a file's footer; several threads may ask for it.

        Raises
        ------
        StoreError, OSError
            If the file cannot be read.
        pyarrow.ArrowException
            If it is not Parquet.
        """
        with self._lock:
            footer = self._parsed.get(path)
            if footer is not None:
                self._parsed.move_to_end(path)
                return footer
        footer = FileFooter.of(self.tail(path))
        with self._lock:
            self._parsed[path] = footer
            while len(self._parsed) > _PARSED:
                self._parsed.popitem(last=False)
        return footer

    def tail(self, path: str) -> bytes:
        """Return the end of a file, as `read_tail` does."""
        with self._lock:
            tail = self._tails.get(path)
            if tail is not None:
                return tail
            others = self._reading.get(path)
            own: Future[bytes] = Future()
            if others is None:
                self._reading[path] = own
        if others is not None:
            return others.result()
        try:
            tail = read_tail(self._store, path)
            self.add({path: tail})
            own.set_result(tail)
            return tail
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._reading[path]

    def add(self, tails: Mapping[str, bytes]) -> None:
        """Take in what another process has read."""
        with self._lock:
            for path, tail in tails.items():
                if path not in self._tails:
                    self._tails[path] = tail
                    self._tail_bytes += len(tail)
            while self._tail_bytes > _UNPARSED_BYTES:
                self._tail_bytes -= len(self._tails.popitem(last=False)[1])
