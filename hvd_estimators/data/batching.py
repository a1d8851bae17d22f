"""Parts of columns in, shuffled batches of exact sizes out, with array operations only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hvd_estimators.data.columns import Array, Columns, concatenate, num_rows, row_bytes, take
from hvd_estimators.data.rows import Layout, Memory, Rows, gather
from hvd_estimators.exceptions import DataError

__all__ = ["RUN_BYTES", "SHUFFLE_BUFFER_BYTES", "Run", "cut_batches", "cut_runs"]

SHUFFLE_BUFFER_BYTES = 128 * 2**20
"""Bytes of rows among which rows are shuffled."""

RUN_BYTES = 4 * 2**20
"""Bytes, about, of the rows that are put in order at a time."""

_RUN_ROWS = 2**16
"""Rows of a run at most: a column of them stays in the processor's cache while it is gathered."""

_CACHE_LINE = 64


@dataclass(frozen=True)
class Run:
    """Some batches that follow one another: their rows, and how many rows each of them has."""

    rows: Rows
    sizes: tuple[int, ...]

    def batches(self) -> Iterator[dict[str, Array]]:
        """Yield each batch as column name to array of ``(rows, *shape)``: views, not copies."""
        start = 0
        for size in self.sizes:
            yield self.rows.slice(start, start + size).columns()
            start += size

    def skip(self, batches: int) -> Run:
        """Return the run without its first batches."""
        start = sum(self.sizes[:batches])
        return Run(self.rows.slice(start, len(self.rows)), self.sizes[batches:])


def cut_batches(
    parts: Iterable[Columns], sizes: Sequence[int], rng: np.random.Generator | None = None
) -> Iterator[dict[str, Array]]:
    """Cut the rows of one pass into batches; see `cut_runs`."""
    for run in cut_runs(parts, sizes, rng):
        yield from run.batches()


def cut_runs(
    parts: Iterable[Columns],
    sizes: Sequence[int],
    rng: np.random.Generator | None = None,
    memory: Memory | None = None,
) -> Iterator[Run]:
    """Cut the rows of one pass into batches of given sizes.

    Rows are shuffled as Rao and Sandelius shuffle (Sankhya A 23, 1961): what comes in is thrown
    into one of many buckets by chance, and the rows of each bucket are then permuted. A pass that
    fits into `SHUFFLE_BUFFER_BYTES` is thrown before the first bucket leaves. In a longer one the
    first bucket leaves when the buffer is full and an empty one takes its place at the end of the
    line, so that a row stays for a uniformly random part of the buffer's length. Where columns are
    narrower than a cache line, neighbours that share one are thrown together, which makes the
    throw as fast as reading in order; the permutation of the bucket parts them.

    Parameters
    ----------
    parts : iterable of Columns
        The rows of the pass, for example one part per row group.
    sizes : sequence of int
        Rows of each batch; they add up to the rows of all parts.
    rng : numpy.random.Generator, optional
        Source of chance; without it the rows keep their order.
    memory : Memory, optional
        Where the batches' memory comes from; one that several passes share is used again.

    Yields
    ------
    Run
        One or more batches; the arrays belong to the receiver. A batch can have no rows.

    Raises
    ------
    DataError
        If the parts hold other than as many rows as the sizes add up to.
    """
    total = sum(sizes)
    open_sizes = deque(sizes)
    layout: Layout | None = None
    memory = memory or Memory()
    held: Rows | None = None
    found = 0
    for pieces in _in_order(parts) if rng is None else _shuffled(parts, total, rng):
        layout = layout or Layout.of(pieces[0].columns)
        rows = _join(held, pieces, layout, memory)
        found += len(rows) - (0 if held is None else len(held))
        if rng is not None:
            rows = rows.take(rng.permutation(len(rows)), memory)
        taken, run = 0, []
        while open_sizes and taken + open_sizes[0] <= len(rows):
            taken += open_sizes[0]
            run.append(open_sizes.popleft())
        held = rows.slice(taken, len(rows)) if taken < len(rows) else None
        if run:
            yield Run(rows, tuple(run))
    if found != total or open_sizes:
        raise DataError(
            f"Expected {total} rows in a pass over the data, found {found}: the files were changed "
            "while they were read. Train again, and leave the files as they are."
        )


@dataclass(frozen=True)
class _Pieces:
    """Some of the pieces, of a number of rows each, into which columns are cut; or all rows."""

    columns: Columns
    piece: int = 1
    chosen: Array | None = None

    @property
    def rows(self) -> int:
        return num_rows(self.columns) if self.chosen is None else len(self.chosen) * self.piece

    def copy_to(self, target: Rows) -> None:
        for name, array in target.columns().items():
            column = self.columns[name]
            if self.chosen is None:
                array[...] = column
            elif self.piece == 1:
                gather(column, self.chosen, array)
            else:
                shape = (-1, self.piece, *array.shape[1:])
                gather(column.reshape(shape), self.chosen, array.reshape(shape))


def _in_order(parts: Iterable[Columns]) -> Iterator[list[_Pieces]]:
    for part in parts:
        step = _run_rows(part)
        for start in range(0, max(num_rows(part), 1), step):
            yield [_Pieces(take(part, slice(start, start + step)))]


def _shuffled(
    parts: Iterable[Columns], total: int, rng: np.random.Generator
) -> Iterator[list[_Pieces]]:
    """Throw rows into buckets; yield what came into each, the first bucket first."""
    buckets: deque[list[_Pieces]] = deque()
    capacity = thrown = taken = 0
    for part in _merged(parts):
        if not buckets:
            capacity = max(int(SHUFFLE_BUFFER_BYTES / row_bytes(part)), 1)
            # Buckets leave and are replaced: the first one has been thrown into twice as often as
            # the mean of them.
            count = -(-min(total, 2 * capacity) // _run_rows(part))
            buckets.extend([] for _ in range(max(count, 1)))
        _throw(part, buckets, rng)
        thrown += num_rows(part)
        while thrown - taken > capacity:
            bucket = buckets.popleft()
            buckets.append([])
            taken += sum(pieces.rows for pieces in bucket)
            if bucket:
                yield bucket
    yield from filter(None, buckets)


def _merged(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Put parts together that are so small that handling each would cost more than its rows."""
    small: list[Columns] = []
    size = 0.0
    for part in parts:
        small.append(part)
        size += row_bytes(part) * num_rows(part)
        if size >= RUN_BYTES:
            yield concatenate(small)
            small, size = [], 0
    if small:
        yield concatenate(small)


def _throw(part: Columns, buckets: deque[list[_Pieces]], rng: np.random.Generator) -> None:
    rows, piece = num_rows(part), _piece_rows(part)
    whole = rows - rows % piece
    for some, length in ((slice(0, whole), piece), (slice(whole, rows), 1)):
        pieces = (some.stop - some.start) // length
        if not pieces:
            continue
        columns = take(part, some)
        labels = rng.integers(0, len(buckets), pieces)
        order = np.argsort(labels, kind="stable")
        stops = np.bincount(labels, minlength=len(buckets)).cumsum().tolist()
        start = 0
        for bucket, stop in zip(buckets, stops, strict=True):
            if stop > start:
                bucket.append(_Pieces(columns, length, order[start:stop]))
            start = stop


def _join(held: Rows | None, pieces: Sequence[_Pieces], layout: Layout, memory: Memory) -> Rows:
    """Copy what a bucket holds behind the rows that are left over."""
    start = 0 if held is None else len(held)
    rows = Rows.empty(pieces[0].columns, layout, start + sum(some.rows for some in pieces), memory)
    if held is not None:
        held.copy_to(rows, 0)
    for some in pieces:
        some.copy_to(rows.slice(start, start + some.rows))
        start += some.rows
    return rows


def _piece_rows(part: Columns) -> int:
    """Return how many rows of a column, in the mean over the columns, fill a cache line."""
    return max(int(_CACHE_LINE * len(part) / row_bytes(part)), 1)


def _run_rows(part: Columns) -> int:
    """Return how many rows are put in order at a time."""
    return min(max(int(RUN_BYTES / row_bytes(part)), 1), _RUN_ROWS)
