"""Turns parts of columns into shuffled batches of exact sizes, with array operations only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hvd_estimators.data.arrays import Array, Columns, num_rows, take
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.blocks import BlockLayout, BufferPool, Rows, row_bytes

__all__ = [
    "CHUNK_BYTES",
    "SHUFFLE_BUFFER_BYTES",
    "Chunk",
    "read_into_memory",
    "shuffle_in_memory",
    "stream_batches",
]

SHUFFLE_BUFFER_BYTES = 128 * 2**20
"""Bytes of rows that are held for shuffling by default."""

CHUNK_BYTES = 4 * 2**20
"""About how many bytes of rows leave the buffer at a time."""

_CHUNK_ROWS = 2**16

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Some batches that follow one another: their rows, and how many rows each of them has."""

    rows: Rows
    sizes: tuple[int, ...]

    def batches(self) -> Iterator[dict[str, Array]]:
        """Yield each batch as column name to array of ``(rows, *shape)``: views, not copies."""
        start = 0
        for size in self.sizes:
            yield self.rows.slice(start, start + size).columns()
            start += size

    def skip(self, batches: int) -> Chunk:
        """Return the chunk without its first batches."""
        start = sum(self.sizes[:batches])
        return Chunk(self.rows.slice(start, len(self.rows)), self.sizes[batches:])


def stream_batches(
    parts: Iterable[Columns],
    sizes: Sequence[int],
    rngs: Iterable[np.random.Generator | None] = (None,),
    memory: BufferPool | None = None,
    buffer_bytes: int | None = None,
) -> Iterator[Chunk]:
    """Cut rows, pass after pass, into batches of given sizes.

    Shuffled rows come by way of a buffer. Once it is full, the rows of each chunk are drawn from
    all over it, and the rows that are read next take their places: a row stays for as long as it
    takes to read one buffer in the mean, and one in three longer, some several times as long. At
    the end of a pass what is left leaves in random order, and rows of the next pass take its
    place. A pass that fits into the buffer leaves in any order with the same probability. The
    order in a pass depends on its generator alone.

    Parameters
    ----------
    parts : iterable of Columns
        The rows of the passes, for example one part per row group; may have no end.
    sizes : sequence of int
        Rows of each batch of a pass; they add up to the rows of its parts.
    rngs : iterable of numpy.random.Generator or None
        Source of chance of each pass; None keeps its rows in their order. A pass is shuffled if
        the others are.
    memory : BufferPool, optional
        Where the batches' memory comes from; one that several callers share is used again.
    buffer_bytes : int, optional
        Bytes of rows that are held for shuffling, rows of one chunk at least. Default:
        `SHUFFLE_BUFFER_BYTES`.

    Yields
    ------
    Chunk
        One or more batches; the arrays belong to the receiver. A batch can have no rows.

    Raises
    ------
    DataError
        If the parts hold other than as many rows as the sizes add up to.
    """
    stream = _Stream(parts, sum(sizes), memory or BufferPool())
    chunks = list(_chunk_sizes(sizes, stream.rows_in(CHUNK_BYTES, most=_CHUNK_ROWS)))
    buffer: _Buffer | None = None
    for rng, is_last in _with_end(rngs):
        if rng is None:
            for chunk in chunks:
                yield Chunk(stream.take(sum(chunk)), chunk)
        else:
            if buffer is None:
                held = stream.rows_in(buffer_bytes or SHUFFLE_BUFFER_BYTES, most=stream.total)
                buffer = _Buffer(stream, min(max(held, *map(sum, chunks)), stream.total))
            yield from _shuffled_pass(buffer, chunks, rng, is_last)
    stream.end()


def read_into_memory(
    parts: Iterable[Columns], total: int, memory: BufferPool | None = None
) -> Rows:
    """Return all rows of a pass as one piece.

    Raises
    ------
    DataError
        If the parts hold other than ``total`` rows.
    """
    stream = _Stream(parts, total, memory or BufferPool())
    rows = stream.take(total)
    stream.end()
    return rows


def shuffle_in_memory(
    rows: Rows,
    sizes: Sequence[int],
    rngs: Iterable[np.random.Generator],
    memory: BufferPool,
) -> Iterator[Chunk]:
    """Cut rows that are held, pass after pass, into batches: in any order, equally often.

    Parameters
    ----------
    rows : Rows
        All rows of a pass.
    sizes, rngs, memory
        See `stream_batches`.
    """
    num_bytes = row_bytes(rows.columns())
    chunks = list(_chunk_sizes(sizes, min(CHUNK_BYTES // max(num_bytes, 1), _CHUNK_ROWS)))
    for rng in rngs:
        order = rng.permutation(len(rows))
        start = 0
        for chunk in chunks:
            yield Chunk(rows.take(order[start : start + sum(chunk)], memory), chunk)
            start += sum(chunk)


def _chunk_sizes(sizes: Sequence[int], chunk_rows: int) -> Iterator[tuple[int, ...]]:
    """Split the sizes of a pass into those of chunks, of one batch at least."""
    chunk: list[int] = []
    rows = 0
    for size in sizes:
        if chunk and rows + size > chunk_rows:
            yield tuple(chunk)
            chunk, rows = [], 0
        chunk.append(size)
        rows += size
    if chunk:
        yield tuple(chunk)


def _with_end(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield items, and whether each is the last one."""
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, False
            item = following
        yield item, True


class _Stream:
    """The rows of all parts, one after another, pass after pass."""

    def __init__(self, parts: Iterable[Columns], total: int, memory: BufferPool) -> None:
        self.total = total
        self.memory = memory
        self._parts = iter(parts)
        self._part: Columns = next(self._parts, {})
        self._taken = 0
        self._in_pass = 0
        self._layout = BlockLayout.of(self._part)

    def rows_in(self, num_bytes: int, most: int) -> int:
        """Return how many rows have a total size; at least one."""
        if not self._part:
            return 1
        row = row_bytes(self._part)
        return min(max(num_bytes // max(row, 1), 1), most)

    def empty(self, rows: int) -> Rows:
        """Return memory for a number of rows."""
        return Rows.empty(self._part, self._layout, rows, self.memory)

    def take(self, count: int) -> Rows:
        """Return the next rows."""
        rows = self.empty(count)
        start = 0
        for columns in self._next(count):
            stop = start + num_rows(columns)
            rows.slice(start, stop).fill(columns)
            start = stop
        return rows

    def copy_to(self, rows: Rows, positions: Array) -> None:
        """Copy the next rows, which are of one pass, to some positions."""
        start = 0
        for columns in self._next(len(positions)):
            stop = start + num_rows(columns)
            rows.put(positions[start:stop], columns, self.memory)
            start = stop

    def _next(self, count: int) -> Iterator[Columns]:
        """Yield the columns of the next rows, which are of one pass."""
        while count:
            if not self._left:
                part = next(self._parts, None)
                if part is None:
                    raise self._other_rows(self._in_pass)
                self._part, self._taken = part, 0
                continue
            some = min(self._left, count)
            taken = self._taken + some
            yield take(self._part, slice(self._taken, taken))
            self._taken = taken
            self._in_pass += some
            count -= some
        if self._in_pass == self.total:
            if self._left:
                raise self._other_rows(self.total + self._left)
            self._in_pass = 0

    @property
    def _left(self) -> int:
        """Rows of the current part that were not taken."""
        return num_rows(self._part) - self._taken if self._part else 0

    def end(self) -> None:
        """Make sure that no rows are left."""
        left = sum(num_rows(part) for part in self._parts)
        if left:
            raise self._other_rows(self.total + left)

    def _other_rows(self, found: int) -> DataError:
        return DataError(
            f"Expected {self.total} rows in a pass over the data, found {found}: the files were "
            "changed while they were read. Train again, and leave the files as they are."
        )


class _Buffer:
    """Rows that wait to leave, each in its own place.

    The places of a pass are numbered in the order in which its first rows came to them. Where in
    memory they lie depends on the pass before, the order of the rows does not.
    """

    def __init__(self, stream: _Stream, size: int) -> None:
        self._stream = stream
        self._rows = stream.empty(size)
        self.size = size
        self._filled: list[Array] = []

    def fill(self) -> Array:
        """Make sure that the first rows of a pass are present; return their places."""
        if not self._filled:
            self.refill(np.arange(self.size))
        places = np.concatenate(self._filled)
        self._filled = []
        return places

    def take(self, places: Array) -> Rows:
        """Return a copy of the rows at some places."""
        return self._rows.take(places, self._stream.memory)

    def put(self, places: Array) -> None:
        """Let the next rows of the pass take some places."""
        self._stream.copy_to(self._rows, places)

    def refill(self, places: Array) -> None:
        """Let the first rows of the next pass take some places."""
        if len(places):
            self._filled.append(np.sort(places))
            self.put(self._filled[-1])


def _shuffled_pass(
    buffer: _Buffer, chunks: Sequence[tuple[int, ...]], rng: np.random.Generator, is_last: bool
) -> Iterator[Chunk]:
    places = buffer.fill()
    to_read = sum(map(sum, chunks)) - buffer.size
    if not to_read:
        places = rng.permutation(places)
    for chunk in chunks:
        rows = sum(chunk)
        if to_read:
            drawn = _draw(rng, buffer.size, rows)
            leaving = places[drawn]
            read = min(rows, to_read)
            to_read -= read
            yield Chunk(buffer.take(rng.permutation(leaving)), chunk)
            buffer.put(leaving[:read])
            freed = leaving[read:]
            if not to_read:
                places = rng.permutation(np.delete(places, drawn[read:]))
        else:
            freed, places = places[:rows], places[rows:]
            yield Chunk(buffer.take(freed), chunk)
        if not is_last:
            buffer.refill(freed)


def _draw(rng: np.random.Generator, size: int, count: int) -> Array:
    """Draw places from all over a buffer, none of them twice, each with the same probability."""
    width = size // max(count, 1)
    first = np.arange(count) * width + int(rng.integers(size))
    return (first + rng.integers(width, size=count)) % size
