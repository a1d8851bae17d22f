"""Reads of Parquet row ranges from local files and remote stores.

PyArrow opens local files directly. An object store takes tens of milliseconds to answer even a
small request. Therefore adjacent columns of a row group are fetched in one request, all requests
run in parallel, and more ranges are read at the same time than threads can decode.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.footers import (
    FileFooter,
    FooterCache,
    Range,
    damage_is_store_error,
    footer_checksum,
    is_whole,
)
from hvd_estimators.data.manifest import ColumnSpec, JoinedSpec, RowRange, stored_names
from hvd_estimators.data.range_cache import RangeCache
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.base import Store
from hvd_estimators.store.files import RangeFile

Fetch = Callable[[int, int], memoryview | bytes]

FETCHED_BYTES = 2**18
"""Bytes of a column that are fetched per request."""

_PAGE_BYTES = 2**20

_PAGE_VALUES = 1024


def open_bytes(chunk: Any) -> int:
    """Return the approximate memory for reading a column of a row group page by page.

    The memory includes a stored page, a decoded page, a dictionary and the prefetched bytes.
    Footers do not record page sizes. Writers aim at 1 MiB, but check the size only about every
    thousand values.

    Parameters
    ----------
    chunk : pyarrow.parquet.ColumnChunkMetaData
        The footer's entry for the column.
    """
    decoded = chunk.total_uncompressed_size
    if decoded > _PAGE_BYTES:
        page = max(_PAGE_BYTES, int(decoded / max(chunk.num_values, 1) * _PAGE_VALUES))
        dictionary = _PAGE_BYTES if chunk.has_dictionary_page else 0
        decoded = min(decoded, page + dictionary)
    return int(decoded + min(chunk.total_compressed_size, FETCHED_BYTES))


_WIDTHS = {
    **{"INT_8": 1, "UINT_8": 1, "INT_16": 2, "UINT_16": 2},
    **{"BOOLEAN": 1 / 8, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8},
    "BYTE_ARRAY": 4,
}
"""Bytes of a value in memory by Parquet type, without the content of text."""

_DICTIONARY_BYTES = 16 * 2**20
"""Maximum size of the text of a row group that is read as a dictionary."""


def decoded_bytes(chunk: Any, metadata: parquet.FileMetaData, leaf: int) -> int:
    """Return the approximate size in memory of a Parquet column in a row group.

    A file may store repeated values only once. Footers do not tell the size of repeated text.

    Parameters
    ----------
    chunk : pyarrow.parquet.ColumnChunkMetaData
        The footer's entry for the column.
    metadata : pyarrow.parquet.FileMetaData
        The footer.
    leaf : int
        Position of the column.
    """
    column = metadata.schema.column(leaf)
    width = _WIDTHS.get(column.converted_type) or _WIDTHS.get(chunk.physical_type, column.length)
    return int(max(chunk.total_uncompressed_size, chunk.num_values * width))


def _is_shared(chunk: Any) -> bool:
    """Return whether many rows share the values of a text column in a row group.

    Otherwise PyArrow would keep all values of the row group in memory as long as the file is open.
    It cannot make dictionaries of some encodings.
    """
    values = chunk.total_uncompressed_size - 4 * chunk.num_values
    is_delta = any("DELTA" in encoding for encoding in chunk.encodings)
    return bool(chunk.has_dictionary_page and not is_delta and values <= _DICTIONARY_BYTES)


HOLE_BYTES = 2**18
"""Maximum gap between two chunks that are fetched in one request.

Fetching the unused bytes takes a few milliseconds, whereas another request takes tens of
milliseconds.
"""


def joined(ranges: Iterable[Range], hole: int = HOLE_BYTES) -> list[Range]:
    """Merge adjacent ranges, and ranges with at most ``hole`` bytes between them."""
    runs: list[Range] = []
    for start, stop in sorted(ranges):
        if runs and start - runs[-1][1] <= hole:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((start, stop))
    return runs


class FetchedFile(RangeFile):
    """File object for some column chunks, which PyArrow reads with a given footer.

    If all chunks fit into ``most`` bytes, they are fetched at once, adjacent ones in one request.
    Otherwise each chunk is fetched piece by piece. The next piece is fetched while PyArrow decodes
    the current one, so memory use does not depend on the size of the row group. Only one thread at
    a time may read.

    Parameters
    ----------
    fetch : callable
        Returns a range of bytes of the file, given its start and its end.
    chunks : sequence of (int, int)
        Ranges to read, see `FileFooter.chunks`. Each range is read sequentially.
    size : int
        Size of the file, at least up to the end of the last chunk.
    most : int
        Approximate maximum of bytes in memory. At least `FETCHED_BYTES` of each chunk are held.
    pool : ThreadPoolExecutor
        Runs the requests.

    Attributes
    ----------
    is_fetched_at_once : bool
        Whether all chunks are fetched at once.
    """

    def __init__(
        self, fetch: Fetch, chunks: Sequence[Range], size: int, most: int, pool: ThreadPoolExecutor
    ) -> None:
        super().__init__(size)
        self._fetch = fetch
        runs = joined(chunks)
        total = sum(stop - start for start, stop in runs)
        self.is_fetched_at_once = total <= most
        spans = runs if self.is_fetched_at_once else chunks
        total = sum(stop - start for start, stop in spans)
        self._spans = []
        for start, stop in spans:
            share = max(most * (stop - start) // max(total, 1) // 2, FETCHED_BYTES)
            piece = stop - start if self.is_fetched_at_once else share
            self._spans.append(_Span(fetch, pool, (start, stop), piece))
        self._starts = [span.start for span in self._spans]
        for span in self._spans:
            span.fetch(0)

    def read_range(self, start: int, stop: int) -> memoryview | bytes:
        """Return a range of bytes that was fetched ahead, or fetch it."""
        index = bisect.bisect_right(self._starts, start) - 1
        span = self._spans[max(index, 0)] if self._spans else None
        if span is None or not span.start <= start < stop <= span.stop:
            # Some old files have chunks that are longer than their footers say.
            return self._fetch(start, stop)
        return span.read(start, stop)

    def read_buffer(self, size: int) -> memoryview | bytes:
        """Return the next bytes without a copy; PyArrow expects this method name."""
        return self.next_range(size)

    def close(self) -> None:
        """Release the fetched bytes and cancel pending requests."""
        for span in self._spans:
            span.forget()
        super().close()


class _Span:
    """A contiguous byte range, fetched piece by piece."""

    def __init__(self, fetch: Fetch, pool: ThreadPoolExecutor, span: Range, piece: int) -> None:
        self.start, self.stop = span
        self.piece = max(piece, 1)
        self._get = fetch
        self._pool = pool
        self._pieces: dict[int, Future[memoryview | bytes]] = {}

    def fetch(self, index: int) -> None:
        """Start to fetch a piece, if it exists and has not been requested."""
        start = self.start + index * self.piece
        if start < self.stop and index not in self._pieces:
            stop = min(start + self.piece, self.stop)
            self._pieces[index] = self._pool.submit(self._get, start, stop)

    def read(self, start: int, stop: int) -> memoryview | bytes:
        """Return bytes of this range, and release all earlier pieces."""
        first = (start - self.start) // self.piece
        last = (stop - 1 - self.start) // self.piece
        for index in [index for index in self._pieces if index < first]:
            del self._pieces[index]
        for index in range(first, last + 2):
            self.fetch(index)
        pieces = [memoryview(self._pieces[i].result()) for i in range(first, last + 1)]
        offset = self.start + first * self.piece
        if len(pieces) == 1:
            return pieces[0][start - offset : stop - offset]
        pieces[-1] = pieces[-1][: stop - self.start - last * self.piece]
        pieces[0] = pieces[0][start - offset :]
        return b"".join(pieces)

    def forget(self) -> None:
        """Release the pieces and cancel their requests."""
        for future in self._pieces.values():
            future.cancel()
        self._pieces.clear()


READ_AHEAD = 4
"""Number of ranges of a remote store that are read at the same time beside the workers' own.

Their requests wait for the store while the workers decode.
"""

WHOLE_BYTES = 32 * 2**20
"""Maximum stored bytes of a row group's columns for a fetch at once; larger ones are split.

Row groups that this package writes are smaller.
"""

OPEN_BYTES = 128 * 2**20
"""Maximum fetched bytes of all interleaved row groups; the default size of the shuffle buffer."""

_VERIFY_PAGES = (
    {"page_checksum_verification": True}
    if "page_checksum_verification" in inspect.signature(parquet.ParquetFile).parameters
    else {}
)
"""Option that verifies the checksums of pages, which Spark writes. PyArrow 14 lacks it."""

_REQUESTS = 16
"""Maximum number of parallel requests."""


def _text_names(specs: Iterable[ColumnSpec]) -> set[str]:
    """Return the names of the columns that may be text, on their own or in rows."""
    names = set()
    for spec in specs:
        if isinstance(spec, JoinedSpec):
            names |= _text_names(spec.members) if spec.kind == "rows" else set()
        elif spec.kind == "text" or (spec.kind == "any" and spec.dtype == "object"):
            names.add(spec.name)
    return names


@dataclass(frozen=True)
class RangeRead:
    """A row range that is read in slices.

    Attributes
    ----------
    row_range : RowRange
        The range.
    rows : int or None
        Rows per slice. Slices begin at multiples of this number within the row group. None means
        one slice with all rows.
    group_size : int
        Number of row ranges that are interleaved, including this one.
    """

    row_range: RowRange
    rows: int | None = None
    group_size: int = 1


class RangeFiles:
    """Context manager that opens the files of row ranges, for several threads.

    Parameters
    ----------
    store : Store
        The store of the files.
    specs : sequence of ColumnSpec
        The columns to read.
    footers : FooterCache, optional
        Cache of known footers. Default: a new, private cache.
    cache : RangeCache, optional
        Local cache of fetched ranges. Default: none.
    """

    def __init__(
        self,
        store: Store,
        specs: Sequence[ColumnSpec],
        footers: FooterCache | None = None,
        cache: RangeCache | None = None,
    ) -> None:
        self.specs = specs
        self.footers = footers or FooterCache(store)
        self._store = store
        self._cache = cache
        self._names = stored_names(specs)
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._text = _text_names(specs)
        self._options: dict[str, Any] = {
            "pre_buffer": False,
            # In nanoseconds, Spark's timestamps before 1677 and after 2262 would wrap.
            "coerce_int96_timestamp_unit": "us",
            **_VERIFY_PAGES,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop fetching and release prefetched bytes."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def tail(self, path: str) -> bytes:
        """Return the end of a file, or a whole small file; see `footers.read_tail`.

        Raises
        ------
        StoreError
            If the file is missing.
        """
        with damage_is_store_error(path):
            return self.footers.tail(path)

    @contextlib.contextmanager
    def open(self, read: RangeRead) -> Iterator[parquet.ParquetFile]:
        """Open the file of a row range, for one read of its row group by `range_tables`.

        Raises
        ------
        StoreError
            If the file is missing, was replaced, or is not a Parquet file.
        """
        path = read.row_range.file
        tail = self.tail(path)
        with damage_is_store_error(path):
            # A small file is parsed once and not kept, because a dataset may have many of them.
            group = read.row_range.row_group
            small = self._parsed(pa.BufferReader(tail), group) if is_whole(tail) else None
            footer = self.footers.get(path) if small is None else None
        checksum = footer_checksum(tail) if footer is None else footer.checksum
        if read.row_range.footer not in (0, checksum):
            raise StoreError(
                f"{path!r} was replaced after training had been planned: its footer has other "
                "contents. Train again, and leave the files as they are."
            )
        if footer is None:
            yield small
            return
        local = self._store.local_path(path)
        if local is not None:
            with self._parsed(local, group, footer.metadata, FETCHED_BYTES) as file:
                yield file
            return
        with contextlib.closing(self._fetched(read, footer)) as source:
            # Not used as a context manager, because PyArrow does not close a file that it did not
            # open.
            buffer_size = 0 if source.is_fetched_at_once else FETCHED_BYTES
            yield self._parsed(source, group, footer.metadata, buffer_size)

    def _parsed(
        self,
        source: Any,
        group: int,
        metadata: parquet.FileMetaData | None = None,
        buffer_size: int = 0,
    ) -> parquet.ParquetFile:
        """Open a file for a row group, whose text stays encoded if many rows share a few values."""
        shared = []
        if self._text:
            metadata = metadata or parquet.read_metadata(source)
            shared = self._shared_text(metadata, group)
        return parquet.ParquetFile(
            source,
            metadata=metadata,
            buffer_size=buffer_size,
            read_dictionary=shared,
            **self._options,
        )

    def _shared_text(self, metadata: parquet.FileMetaData, group: int) -> list[str]:
        if group >= metadata.num_row_groups:
            return []  # another file than the planned one, which the caller tells
        chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
        # A column of structs may have the name of a column that is text in other files.
        of_text = (chunk for chunk in chunks if chunk.path_in_schema in self._text)
        return [chunk.path_in_schema for chunk in of_text if _is_shared(chunk)]

    def _fetched(self, read: RangeRead, footer: FileFooter) -> FetchedFile:
        path, group = read.row_range.file, read.row_range.row_group

        def fetch(start: int, stop: int) -> bytes:
            (data,) = self._store.read_ranges(path, [(start, stop)])
            if len(data) != stop - start:
                raise StoreError(
                    f"{path!r} has no {stop - start} bytes at {start}: it was changed after "
                    "training had begun. Train again, and leave the files as they are."
                )
            return data

        def cached(start: int, stop: int) -> memoryview | bytes:
            assert self._cache is not None
            return self._cache.get(path, footer.checksum, start, stop, fetch)

        # If the row group no longer exists, reading it raises the error.
        exists = group < footer.metadata.num_row_groups
        chunks = footer.chunks(group, self._names) if exists else []
        most = min(WHOLE_BYTES, OPEN_BYTES // read.group_size)
        with self._lock:
            self._pool = self._pool or ThreadPoolExecutor(_REQUESTS, "hvd_estimators requests")
            pool = self._pool
        read_range = fetch if self._cache is None else cached
        return FetchedFile(read_range, chunks, footer.end, most, pool)
