"""Reads of Parquet column chunks from remote stores.

An object store takes tens of milliseconds to answer even a small request. Therefore adjacent
columns of a row group are fetched in one request, and all requests run in parallel.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hvd_estimators.exceptions import StoreError
from hvd_estimators.store.base import Store

__all__ = ["FETCHED_BYTES", "HOLE_BYTES", "FetchedFile", "Range", "joined", "open_bytes"]

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


Range = tuple[int, int]
"""Byte range of a file: first byte (inclusive) and last byte (exclusive)."""


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

    Attributes
    ----------
    held_bytes : int
        Maximum number of bytes in memory.
    whole : bool
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
    ) -> None:
        super().__init__()
        self._spans: list[_Span] = []
        self._store = store
        self._path = path
        self._size = size
        self._position = 0
        runs = joined(chunks)
        total = sum(stop - start for start, stop in runs)
        self.whole = total <= most
        if self.whole:
            self.held_bytes = total
            self._spans = [_Span(self, pool, run, run[1] - run[0]) for run in runs]
        else:
            total = sum(stop - start for start, stop in chunks)
            for start, stop in chunks:
                piece = max(most * (stop - start) // total // 2, FETCHED_BYTES)
                self._spans.append(_Span(self, pool, (start, stop), piece))
            self.held_bytes = sum(2 * span.piece for span in self._spans)
        self._starts = [span.start for span in self._spans]
        for span in self._spans:
            span.fetch(0)

    def fetch(self, start: int, stop: int) -> bytes:
        """Fetch a byte range."""
        (found,) = self._store.read_ranges(self._path, [(start, stop)])
        if len(found) != stop - start:
            raise StoreError(
                f"{self._path!r} has no {stop - start} bytes at {start}: it was changed after "
                "training had begun. Train again, and leave the files as they are."
            )
        return found

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
            return self.fetch(start, stop)
        return span.read(start, stop)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        return bytes(self.read_buffer(self._size if size < 0 else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position and return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
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
        self._fetch = file.fetch
        self._pool = pool
        self._pieces: dict[int, Future[bytes]] = {}

    def fetch(self, index: int) -> None:
        """Start to fetch a piece, if it exists and has not been requested."""
        start = self.start + index * self.piece
        if start < self.stop and index not in self._pieces:
            stop = min(start + self.piece, self.stop)
            self._pieces[index] = self._pool.submit(self._fetch, start, stop)

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
