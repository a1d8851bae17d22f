"""Shuffling and batching of columns into batches of exact sizes, with array operations only."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_estimators.data.arrays import Array, Columns, num_rows, take
from hvd_estimators.data.rows import RowTable
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.blocks import BlockLayout, BufferPool, Rows, TableRows, row_bytes
from hvd_estimators.loading.collate import CollatedBatch
from hvd_estimators.loading.plan import BatchSizes

SHUFFLE_BUFFER_BYTES = 128 * 2**20
"""Default size of the shuffle buffer."""

CHUNK_BYTES = 4 * 2**20
"""Approximate number of bytes that leave the buffer at a time."""

_CHUNK_ROWS = 2**16


@dataclass(frozen=True)
class Chunk:
    """Consecutive batches: their rows, and the number of rows in each batch."""

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


Batches = Chunk | CollatedBatch
"""Consecutive batches: of columns, or one that a user's function made."""


def first_batches(chunks: Iterator[Batches], count: int) -> Generator[Batches, None, None]:
    """Yield chunks until they have a number of batches. Does not close the iterator."""
    for chunk in chunks:
        yield chunk
        count -= len(chunk.sizes)
        if count <= 0:
            return


def stream_batches(
    parts: Iterable[Columns],
    sizes: Sequence[int],
    rngs: Iterable[np.random.Generator | None] = (None,),
    memory: BufferPool | None = None,
    buffer_bytes: int | None = None,
    varying_bytes: int = 0,
) -> Iterator[Chunk]:
    """Split rows, pass after pass, into batches of given sizes.

    Shuffled rows go through a buffer. When the buffer is full, the rows of each chunk are drawn
    from the whole buffer, and newly read rows replace them. On average, a row stays for as long as
    it takes to read one buffer. One in three rows stays longer, some several times as long.

    At the end of a pass, the remaining rows leave in random order, and rows of the next pass
    replace them. If a pass fits into the buffer, all orders are equally likely. The order within a
    pass depends only on its generator.

    Parameters
    ----------
    parts : iterable of Columns
        The rows of the passes, for example one part per row group. May be infinite.
    sizes : sequence of int
        Rows of each batch of a pass. Their sum is the number of rows in a pass. `BatchSizes` need
        no time and memory for each batch.
    rngs : iterable of numpy.random.Generator or None
        Random number generator of each pass; None keeps the order of its rows. Either all passes
        are shuffled or none.
    memory : BufferPool, optional
        Allocates the batches. Callers that share a pool reuse its memory.
    buffer_bytes : int, optional
        Size of the shuffle buffer in bytes; at least the rows of one chunk. Default:
        `SHUFFLE_BUFFER_BYTES`.
    varying_bytes : int
        See `row_bytes`. A part tells no size, because a resumed run begins with another part.

    Yields
    ------
    Chunk
        One or more batches. The receiver owns the arrays. A batch can be empty.

    Raises
    ------
    DataError
        If the number of rows in the parts differs from the sum of the sizes.
    """
    stream = _Stream(parts, _total(sizes), memory or BufferPool(), varying_bytes)
    chunks = _ChunkSizes(sizes, stream.rows_in(CHUNK_BYTES, most=_CHUNK_ROWS))
    buffer: _Buffer | None = None
    end: Any = object()
    for rng, following in itertools.pairwise(itertools.chain(rngs, [end])):
        if rng is None:
            for chunk in chunks:
                yield Chunk(stream.take(sum(chunk)), chunk)
        else:
            if buffer is None:
                buffer_rows = stream.rows_in(
                    buffer_bytes or SHUFFLE_BUFFER_BYTES, most=stream.total
                )
                largest = chunks.largest(least=buffer_rows)
                buffer = _Buffer(stream, min(max(buffer_rows, largest), stream.total))
            yield from _shuffled_pass(buffer, chunks, stream.total, rng, following is end)
    stream.end()


def read_into_memory(
    parts: Iterable[Columns], total: int, memory: BufferPool | None = None
) -> Rows:
    """Return all rows of a pass.

    Raises
    ------
    DataError
        If the parts do not contain exactly ``total`` rows.
    """
    stream = _Stream(parts, total, memory or BufferPool())
    rows = stream.take(total)
    stream.end()
    return rows


def batches_in_memory(
    rows: Rows,
    sizes: Sequence[int],
    rngs: Iterable[np.random.Generator | None],
    memory: BufferPool,
    varying_bytes: int,
) -> Iterator[Chunk]:
    """Split rows in memory, pass after pass, into batches; with generators, in uniform order.

    Parameters
    ----------
    rows : Rows
        All rows of a pass.
    sizes, rngs, memory, varying_bytes
        See `stream_batches`.
    """
    num_bytes = row_bytes(rows.slice(0, 0).columns(), varying_bytes)
    chunks = _ChunkSizes(sizes, min(CHUNK_BYTES // max(num_bytes, 1), _CHUNK_ROWS))
    for rng in rngs:
        order = np.arange(len(rows)) if rng is None else rng.permutation(len(rows))
        start = 0
        for chunk in chunks:
            yield Chunk(rows.take(order[start : start + sum(chunk)], memory), chunk)
            start += sum(chunk)


class _ChunkSizes:
    """Batch sizes of each chunk of a pass: at least one batch, and otherwise at most some rows.

    The chunks of a pass are computed while it is read. A list of them would have an entry for each
    of a rank's batches, and a pass may have millions.
    """

    def __init__(self, sizes: Sequence[int], chunk_rows: int) -> None:
        self._sizes = sizes
        self._chunk_rows = chunk_rows

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        chunk: list[int] = []
        rows = 0
        for size in self._sizes:
            if chunk and rows + size > self._chunk_rows:
                yield tuple(chunk)
                chunk, rows = [], 0
            chunk.append(size)
            rows += size
        if chunk:
            yield tuple(chunk)

    def largest(self, least: int) -> int:
        """Return ``least`` if no chunk can have more rows, otherwise the largest chunk's rows."""
        sizes = self._sizes
        distinct = sizes.distinct() if isinstance(sizes, BatchSizes) else set(sizes)
        if max(distinct | {self._chunk_rows}) <= least:
            return least
        return max(map(sum, self))


def _total(sizes: Sequence[int]) -> int:
    return sizes.total if isinstance(sizes, BatchSizes) else sum(sizes)


class _Stream:
    """The rows of all parts in sequence, pass after pass."""

    def __init__(
        self, parts: Iterable[Columns], total: int, memory: BufferPool, varying_bytes: int = 0
    ) -> None:
        self.total = total
        self._varying_bytes = varying_bytes
        self.memory = memory
        self._parts = iter(parts)
        self._part: Columns = next(self._parts, {})
        self._position = 0
        self._in_pass = 0
        is_table = any(isinstance(values, RowTable) for values in self._part.values())
        self._layout = None if is_table else BlockLayout.of(self._part)

    def rows_in(self, num_bytes: int, most: int) -> int:
        """Return the number of rows in a given size in bytes; at least one, at most ``most``."""
        if not self._part:
            return 1
        row = row_bytes(self._part, self._varying_bytes)
        return min(max(num_bytes // max(row, 1), 1), most)

    def empty(self, rows: int) -> Rows:
        """Return uninitialized memory for a number of rows."""
        if self._layout is None:
            return TableRows.of_size(rows)
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
        """Copy the next rows to some positions. All of these rows must be in one pass."""
        start = 0
        for columns in self._next(len(positions)):
            stop = start + num_rows(columns)
            rows.put(positions[start:stop], columns, self.memory)
            start = stop

    def _next(self, count: int) -> Iterator[Columns]:
        """Yield the columns of the next rows. All of these rows must be in one pass."""
        while count:
            if not self._left:
                part = next(self._parts, None)
                if part is None:
                    raise self._other_rows(self._in_pass)
                self._part, self._position = part, 0
                continue
            some = min(self._left, count)
            end = self._position + some
            yield take(self._part, slice(self._position, end))
            self._position = end
            self._in_pass += some
            count -= some
        if self._in_pass == self.total:
            if self._left:
                raise self._other_rows(self.total + self._left)
            self._in_pass = 0

    @property
    def _left(self) -> int:
        """Number of remaining rows in the current part."""
        return num_rows(self._part) - self._position if self._part else 0

    def end(self) -> None:
        """Check that no rows are left."""
        left = sum(num_rows(part) for part in self._parts)
        if left:
            raise self._other_rows(self.total + left)

    def _other_rows(self, rows: int) -> DataError:
        return DataError(
            f"Expected {self.total} rows in a pass over the data, found {rows}: the files were "
            "changed while they were read. Train again, and leave the files as they are."
        )


class _Buffer:
    """Shuffle buffer, in which each row has a slot.

    The slots of a pass are numbered in the order in which its first rows filled them. Their memory
    locations depend on the previous pass, but the order of the rows does not.
    """

    def __init__(self, stream: _Stream, size: int) -> None:
        self._stream = stream
        self._rows = stream.empty(size)
        self.size = size
        self._filled: list[Array] = []

    def fill(self) -> Array:
        """Fill the buffer with the first rows of a pass, if necessary, and return their slots."""
        if not self._filled:
            self.refill(np.arange(self.size))
        slots = np.concatenate(self._filled)
        self._filled = []
        return slots

    def take(self, slots: Array) -> Rows:
        """Return a copy of the rows in some slots."""
        return self._rows.take(slots, self._stream.memory)

    def put(self, slots: Array) -> None:
        """Read the next rows of the pass into some slots."""
        self._stream.copy_to(self._rows, slots)

    def refill(self, slots: Array) -> None:
        """Read the first rows of the next pass into some slots."""
        if len(slots):
            self._filled.append(np.sort(slots))
            self.put(self._filled[-1])


def _shuffled_pass(
    buffer: _Buffer,
    chunks: Iterable[tuple[int, ...]],
    total: int,
    rng: np.random.Generator,
    is_last: bool,
) -> Iterator[Chunk]:
    slots = buffer.fill()
    to_read = total - buffer.size
    if not to_read:
        slots = rng.permutation(slots)
    for chunk in chunks:
        rows = sum(chunk)
        if to_read:
            drawn = _draw(rng, buffer.size, rows)
            leaving = slots[drawn]
            read = min(rows, to_read)
            to_read -= read
            yield Chunk(buffer.take(rng.permutation(leaving)), chunk)
            buffer.put(leaving[:read])
            freed = leaving[read:]
            if not to_read:
                slots = rng.permutation(np.delete(slots, drawn[read:]))
        else:
            freed, slots = slots[:rows], slots[rows:]
            yield Chunk(buffer.take(freed), chunk)
        if not is_last:
            buffer.refill(freed)


def _draw(rng: np.random.Generator, size: int, count: int) -> Array:
    """Draw distinct slots, spread over the whole buffer, all with equal probability."""
    width = size // max(count, 1)
    first = np.arange(count) * width + int(rng.integers(size))
    return (first + rng.integers(width, size=count)) % size
