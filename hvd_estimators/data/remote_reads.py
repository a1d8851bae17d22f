"""Reads of Parquet row ranges from local files and remote stores.

PyArrow opens local files directly. An object store takes tens of milliseconds to answer even a
small request. Therefore adjacent columns of a row group are fetched in one request, all requests
run in parallel, and the next ranges are fetched while the current one is decoded.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import io
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.footers import FileFooter, FooterCache, Range, damage_is_store_error
from hvd_estimators.data.manifest import ColumnSpec, RowRange, stored_names
from hvd_estimators.data.range_cache import RangeCache
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.base import Store

S = TypeVar("S")

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
    value = chunk.total_uncompressed_size / max(chunk.num_values, 1)
    page = max(_PAGE_BYTES, int(value * _PAGE_VALUES))
    dictionary = _PAGE_BYTES if chunk.has_dictionary_page else 0
    decoded = min(chunk.total_uncompressed_size, page + dictionary)
    return int(decoded + min(chunk.total_compressed_size, FETCHED_BYTES))


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


class FetchedFile(io.RawIOBase):
    """File object for some column chunks, which PyArrow reads with a given footer.

    If all chunks fit into ``most`` bytes, they are fetched at once, adjacent ones in one request.
    Otherwise each chunk is fetched piece by piece. The next piece is fetched while PyArrow decodes
    the current one, so memory use does not depend on the size of the row group. Only one thread at
    a time may read.

    Parameters
    ----------
    store : Store
        The store of the file.
    path : str
        Full path of the file.
    chunks : sequence of (int, int)
        Ranges to read, see `FileFooter.chunks`. Each range is read sequentially.
    size : int
        Size of the file, at least up to the end of the last chunk.
    most : int
        Approximate maximum of bytes in memory. At least `FETCHED_BYTES` of each chunk are held.
    pool : ThreadPoolExecutor
        Runs the requests.
    cached : callable, optional
        Returns a byte range from a cache; gets the range and `fetch`. Default: no cache.

    Attributes
    ----------
    max_bytes : int
        Maximum number of bytes in memory.
    is_fetched_at_once : bool
        Whether all chunks are fetched at once.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        chunks: Sequence[Range],
        size: int,
        most: int,
        pool: ThreadPoolExecutor,
        cached: Callable[..., memoryview | bytes] | None = None,
    ) -> None:
        super().__init__()
        self._cached = cached
        self._spans: list[_Span] = []
        self._store = store
        self._path = path
        self._size = size
        self._position = 0
        runs = joined(chunks)
        total = sum(stop - start for start, stop in runs)
        self.is_fetched_at_once = total <= most
        if self.is_fetched_at_once:
            self.max_bytes = total
            self._spans = [_Span(self, pool, run, run[1] - run[0]) for run in runs]
        else:
            total = sum(stop - start for start, stop in chunks)
            for start, stop in chunks:
                piece = max(most * (stop - start) // total // 2, FETCHED_BYTES)
                self._spans.append(_Span(self, pool, (start, stop), piece))
            self.max_bytes = sum(2 * span.piece for span in self._spans)
        self._starts = [span.start for span in self._spans]
        for span in self._spans:
            span.fetch(0)

    def get(self, start: int, stop: int) -> memoryview | bytes:
        """Return a byte range from the cache or the store."""
        fetch = self._fetch
        return fetch(start, stop) if self._cached is None else self._cached(start, stop, fetch)

    def _fetch(self, start: int, stop: int) -> bytes:
        (data,) = self._store.read_ranges(self._path, [(start, stop)])
        if len(data) != stop - start:
            raise StoreError(
                f"{self._path!r} has no {stop - start} bytes at {start}: it was changed after "
                "training had begun. Train again, and leave the files as they are."
            )
        return data

    def read_buffer(self, size: int) -> memoryview | bytes:
        """Return the next bytes without a copy; PyArrow expects this method name."""
        start, stop = self._position, min(self._position + size, self._size)
        self._position = stop
        if stop <= start:
            return b""
        index = bisect.bisect_right(self._starts, start) - 1
        span = self._spans[max(index, 0)] if self._spans else None
        if span is None or not span.start <= start < stop <= span.stop:
            # Some old files have chunks that are longer than their footers say.
            return self.get(start, stop)
        return span.read(start, stop)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        return bytes(self.read_buffer(self._size if size < 0 else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Release the fetched bytes and cancel pending requests."""
        for span in self._spans:
            span.forget()
        super().close()


class _Span:
    """A contiguous byte range, fetched piece by piece."""

    def __init__(
        self, file: FetchedFile, pool: ThreadPoolExecutor, span: Range, piece: int
    ) -> None:
        self.start, self.stop = span
        self.piece = max(piece, 1)
        self._get = file.get
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
        for future in self._pieces.values():
            future.cancel()
        self._pieces.clear()


WHOLE_BYTES = 64 * 2**20
"""Maximum stored bytes of a row group's columns for a fetch at once; larger ones are split.

Spark's default row groups, 128 MiB before compression, are mostly smaller.
"""

OPEN_BYTES = 2 * WHOLE_BYTES
"""Maximum fetched bytes of all interleaved row groups; the default size of the shuffle buffer."""

AHEAD_BYTES = WHOLE_BYTES
"""Maximum bytes that are prefetched."""

_VERIFY_PAGES = (
    {"page_checksum_verification": True}
    if "page_checksum_verification" in inspect.signature(parquet.ParquetFile).parameters
    else {}
)
"""Option that verifies the checksums of pages, which Spark writes. PyArrow 14 lacks it."""

_AHEAD_RANGES = 4
_REQUESTS = 16
"""Maximum number of parallel requests."""


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
        self._announced: deque[_Announced] = deque()
        self._options: dict[str, Any] = {
            # Keep text dictionary-encoded, because many rows may share a few values.
            "read_dictionary": [spec.name for spec in specs if spec.kind == "text"],
            "pre_buffer": False,
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
            announced = list(self._announced)
            self._announced.clear()
        for each in announced:
            if each.file is not None:
                each.file.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def open(self, read: RangeRead) -> Iterator[parquet.ParquetFile]:
        """Open the file of a row range, for one read of its row group by `range_tables`.

        Raises
        ------
        StoreError
            If the file is missing, was replaced, or is not a Parquet file.
        """
        path = read.row_range.file
        announced = self._take(read)
        with damage_is_store_error(path):
            footer = self.footers.get(path) if announced is None else announced.footer.result()
        if read.row_range.footer not in (0, footer.checksum):
            raise StoreError(
                f"{path!r} was replaced after training had been planned: its footer has other "
                "contents. Train again, and leave the files as they are."
            )
        options = {**self._options, "metadata": footer.metadata}
        if footer.content is not None:
            self._advance()
            content = pa.BufferReader(footer.content)
            yield parquet.ParquetFile(content, **options)
            return
        local = self._store.local_path(path)
        if local is not None:
            with parquet.ParquetFile(local, buffer_size=FETCHED_BYTES, **options) as file:
                yield file
            return
        source = (announced and announced.file) or self._fetch(read, footer)
        with contextlib.closing(source):
            self._advance()
            # Not used as a context manager, because PyArrow does not close a file that it did not
            # open.
            buffer_size = 0 if source.is_fetched_at_once else FETCHED_BYTES
            yield parquet.ParquetFile(source, buffer_size=buffer_size, **options)

    def announce(self, read: RangeRead) -> None:
        """Announce a range that will be opened after all earlier announced ranges.

        The range is fetched as soon as the prefetch limit allows it. Does nothing for local files.
        """
        path = read.row_range.file
        if self._store.local_path(path) is not None:
            return
        footer = self._running().submit(self.footers.get, path)
        with self._lock:
            self._announced.append(_Announced(read, footer))
        footer.add_done_callback(lambda _: self._advance())

    def ahead(
        self,
        groups: Iterator[tuple[S, ...]],
        ranges: Callable[[S], Iterable[RangeRead]] = lambda element: [element],  # type: ignore[list-item]
    ) -> Iterator[tuple[S, ...]]:
        """Yield groups unchanged, and announce upcoming ranges before they are opened.

        Parameters
        ----------
        groups : iterator of tuple
            Groups of ranges, or of other elements. Consumed a few elements ahead.
        ranges : callable
            Returns the ranges of an element. Default: the element is a range.
        """
        waiting: deque[tuple[S, ...]] = deque()
        for group in groups:
            for read in itertools.chain.from_iterable(map(ranges, group)):
                self.announce(read)
            waiting.append(group)
            if sum(map(len, waiting)) > _AHEAD_RANGES:
                yield waiting.popleft()
        yield from waiting

    def _take(self, read: RangeRead) -> _Announced | None:
        """Return the announced range and forget it; None if it was not announced."""
        with self._lock:
            for announced in self._announced:
                if announced.read == read:
                    self._announced.remove(announced)
                    return announced
        return None

    def _advance(self) -> None:
        """Fetch announced ranges in order, within the prefetch limit."""
        with self._lock:
            bytes_ahead = sum(each.file.max_bytes for each in self._announced if each.file)
            for announced in self._announced:
                if announced.file is not None:
                    continue
                read, footer = announced.read, announced.footer
                if not footer.done() or self._pool is None:
                    return
                # If the footer cannot be read, opening the file raises the error.
                if footer.cancelled() or footer.exception() or footer.result().content is not None:
                    continue
                chunks = self._chunks(read, footer.result())
                needed = min(sum(stop - start for start, stop in chunks), _share(read))
                if bytes_ahead and bytes_ahead + needed > AHEAD_BYTES:
                    return
                announced.file = self._fetch(read, footer.result())
                bytes_ahead += announced.file.max_bytes

    def _fetch(self, read: RangeRead, footer: FileFooter) -> FetchedFile:
        path, cache = read.row_range.file, self._cache
        return FetchedFile(
            self._store,
            path,
            self._chunks(read, footer),
            footer.end,
            _share(read),
            self._pool or self._running(),
            None if cache is None else functools.partial(cache.get, path, footer.checksum),
        )

    def _chunks(self, read: RangeRead, footer: FileFooter) -> list[tuple[int, int]]:
        group = read.row_range.row_group
        # If the row group no longer exists, reading it raises the error.
        return footer.chunks(group, self._names) if group < footer.metadata.num_row_groups else []

    def _running(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS, "hvd_estimators requests")
            return self._pool


@dataclass(eq=False)
class _Announced:
    """A range that will be opened.

    Attributes
    ----------
    read : RangeRead
        The range.
    footer : Future
        The footer of its file; the whole file if it is small.
    file : FetchedFile or None
        The range's columns, once they are being fetched; None for a small file.
    """

    read: RangeRead
    footer: Future[FileFooter]
    file: FetchedFile | None = None


def _share(read: RangeRead) -> int:
    """Return the maximum number of bytes of a range in memory."""
    return min(WHOLE_BYTES, OPEN_BYTES // read.group_size)
