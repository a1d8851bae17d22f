"""Reads of Parquet column chunks from stores that answer requests.

An object store answers a request after tens of milliseconds, however little is asked for. So a row
group's columns are fetched in one request for each run of neighbours, all at a time.
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


"""How many bytes of a column are fetched at a time."""


_PAGE_BYTES = 2**20


_PAGE_VALUES = 1024


def open_bytes(chunk: Any) -> int:
    """Return about how much memory a column of a row group takes while it is read page by page.

    It holds a stored page, a decoded page, a dictionary, and what is fetched ahead. Footers do not
    tell how large pages are: writers aim at 1 MiB, but check the size only after each thousand
    values or so.

    Parameters
    ----------
    chunk : pyarrow.parquet.ColumnChunkMetaData
        What the footer tells about the column.
    """
    value = chunk.total_uncompressed_size / max(chunk.num_values, 1)
    page = max(_PAGE_BYTES, int(value * _PAGE_VALUES))
    dictionary = _PAGE_BYTES if chunk.has_dictionary_page else 0
    decoded = min(chunk.total_uncompressed_size, page + dictionary)
    return int(decoded + min(chunk.total_compressed_size, FETCHED_BYTES))


HOLE_BYTES = 2**18


"""Bytes that nobody wants, but that are fetched where they lie between two chunks that are wanted.

To fetch them takes a few milliseconds; another request, tens of them.
"""


Range = tuple[int, int]


"""Bytes of a file: from the first up to, but not including, the last."""


def joined(ranges: Iterable[Range], hole: int = HOLE_BYTES) -> list[Range]:
    """Join neighbours, and those with at most so many bytes between them."""
    runs: list[Range] = []
    for start, stop in sorted(ranges):
        if runs and start - runs[-1][1] <= hole:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((start, stop))
    return runs


class FetchedFile(io.RawIOBase):
    """Some column chunks of a file, as a file that PyArrow reads with the footer given.

    Chunks that fit into a number of bytes are all fetched at once, neighbours in one request.
    Larger ones are fetched piece by piece, the next one while PyArrow decodes the one before, so
    that a row group of any size takes about as many bytes of memory. One thread at a time may read.

    Parameters
    ----------
    store : Store
        Where the file is.
    path : str
        Its full path.
    chunks : sequence of (int, int)
        What will be read, see `FileFooter.chunks`; each is read from its beginning to its end.
    size : int
        Where the file ends, at least up to the last chunk.
    most : int
        Bytes to hold, about; at least `FETCHED_BYTES` of each chunk are.
    pool : ThreadPoolExecutor
        Runs the requests.

    Attributes
    ----------
    held_bytes : int
        How many bytes are held, at most.
    whole : bool
        Whether all is fetched at once.
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
        """Request some bytes now."""
        (found,) = self._store.read_ranges(self._path, [(start, stop)])
        if len(found) != stop - start:
            raise StoreError(
                f"{self._path!r} has no {stop - start} bytes at {start}: it was changed after "
                "training had begun. Train again, and leave the files as they are."
            )
        return found

    def read_buffer(self, size: int) -> memoryview | bytes:
        """Return bytes at the position without copying them; PyArrow asks for them by this name."""
        start, stop = self._position, min(self._position + size, self._size)
        self._position = stop
        if stop <= start:
            return b""
        index = bisect.bisect_right(self._starts, start) - 1
        span = self._spans[max(index, 0)] if self._spans else None
        if span is None or not span.start <= start < stop <= span.stop:
            # Some old files have chunks that are longer than their footers tell.
            return self.fetch(start, stop)
        return span.read(start, stop)

    def read(self, size: int = -1) -> bytes:
        """Return bytes at the position."""
        return bytes(self.read_buffer(self._size if size < 0 else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, and return it."""
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
        """Forget what was fetched; what is not needed any more is not requested."""
        for span in self._spans:
            span.forget()
        super().close()


class _Span:
    """Neighbouring bytes, fetched piece by piece."""

    def __init__(
        self, file: FetchedFile, pool: ThreadPoolExecutor, span: Range, piece: int
    ) -> None:
        self.start, self.stop = span
        self.piece = max(piece, 1)
        self._fetch = file.fetch
        self._pool = pool
        self._pieces: dict[int, Future[bytes]] = {}

    def fetch(self, index: int) -> None:
        """Begin to fetch a piece, if there is one."""
        start = self.start + index * self.piece
        if start < self.stop and index not in self._pieces:
            stop = min(start + self.piece, self.stop)
            self._pieces[index] = self._pool.submit(self._fetch, start, stop)

    def read(self, start: int, stop: int) -> memoryview | bytes:
        """Return bytes that lie in here, and forget those before them."""
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
