"""Parts of columns in, shuffled batches of exact sizes out, with array operations only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hvd_estimators.data.columns import Array, Columns, num_rows, take
from hvd_estimators.data.rows import Layout, Memory, Rows
from hvd_estimators.exceptions import DataError

__all__ = ["RUN_BYTES", "SHUFFLE_BUFFER_BYTES", "Run", "cut_runs"]

SHUFFLE_BUFFER_BYTES = 128 * 2**20
"""Bytes of rows that are held for shuffling."""

RUN_BYTES = 4 * 2**20
"""Bytes, about, of the rows that leave at a time."""

_RUN_ROWS = 2**16

T = TypeVar("T")


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


def cut_runs(
    parts: Iterable[Columns],
    sizes: Sequence[int],
    rngs: Iterable[np.random.Generator | None] = (None,),
    memory: Memory | None = None,
) -> Iterator[Run]:
    """Cut rows, pass after pass, into batches of given sizes.

    Shuffled rows come by way of windows. The rows of a window are put in random order; one half
    of them leaves with the second half of the window before, in turns, and the other half with
    the next window, so that neighbours are parted by up to two windows. Three windows are held,
    the third of which is filled, also with the rows of the next pass, while the rows of the other
    two leave. A pass of one window (up to half of `SHUFFLE_BUFFER_BYTES`) leaves in any order
    with the same probability. The order in a pass depends on its generator alone.

    Parameters
    ----------
    parts : iterable of Columns
        The rows of the passes, for example one part per row group; may have no end.
    sizes : sequence of int
        Rows of each batch of a pass; they add up to the rows of its parts.
    rngs : iterable of numpy.random.Generator or None
        Source of chance of each pass; None keeps its rows in their order. A pass is shuffled if
        the others are.
    memory : Memory, optional
        Where the batches' memory comes from; one that several callers share is used again.

    Yields
    ------
    Run
        One or more batches; the arrays belong to the receiver. A batch can have no rows.

    Raises
    ------
    DataError
        If the parts hold other than as many rows as the sizes add up to.
    """
    stream = _Stream(parts, sum(sizes), memory or Memory())
    runs = list(_run_sizes(sizes, stream.rows_in(RUN_BYTES, most=_RUN_ROWS)))
    windows: _Windows | None = None
    for rng, is_last in _with_end(rngs):
        if rng is None:
            for run in runs:
                yield Run(stream.take(sum(run)), run)
        else:
            windows = windows or _Windows(stream, max(map(sum, runs)))
            yield from _shuffled_pass(windows, runs, rng, is_last)
    stream.end()


def _run_sizes(sizes: Sequence[int], run_rows: int) -> Iterator[tuple[int, ...]]:
    """Split the sizes of a pass into those of runs, of one batch at least."""
    run: list[int] = []
    rows = 0
    for size in sizes:
        if run and rows + size > run_rows:
            yield tuple(run)
            run, rows = [], 0
        run.append(size)
        rows += size
    if run:
        yield tuple(run)


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

    def __init__(self, parts: Iterable[Columns], total: int, memory: Memory) -> None:
        self.total = total
        self.memory = memory
        self._parts = iter(parts)
        self._part: Columns = next(self._parts, {})
        self._taken = 0
        self._in_pass = 0
        self._layout = Layout.of(self._part)

    def rows_in(self, num_bytes: int, most: int) -> int:
        """Return how many rows have a size, at least one."""
        if not self._part:
            return 1
        row = sum(array.itemsize * math.prod(array.shape[1:]) for array in self._part.values())
        return min(max(num_bytes // max(row, 1), 1), most)

    def empty(self, rows: int) -> Rows:
        """Return memory for a number of rows."""
        return Rows.empty(self._part, self._layout, rows, self.memory)

    def take(self, count: int) -> Rows:
        """Return the next rows."""
        rows = self.empty(count)
        self.copy_to(rows, 0, count)
        return rows

    def copy_to(self, rows: Rows, start: int, stop: int) -> None:
        """Copy the next rows, which are of one pass, to some positions."""
        while start < stop:
            if not self._left:
                part = next(self._parts, None)
                if part is None:
                    raise self._other_rows(self._in_pass)
                self._part, self._taken = part, 0
                continue
            count = min(self._left, stop - start)
            taken = self._taken + count
            rows.slice(start, start + count).fill(take(self._part, slice(self._taken, taken)))
            start, self._taken = start + count, taken
            self._in_pass += count
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


class _Windows:
    """Memory for two or three windows of rows, which are filled in turns."""

    def __init__(self, stream: _Stream, run_rows: int) -> None:
        self._stream = stream
        total = stream.total
        if total <= stream.rows_in(SHUFFLE_BUFFER_BYTES // 2, most=total):
            self._slots, self._slot_rows = 2, total
        else:
            rows = stream.rows_in(SHUFFLE_BUFFER_BYTES // 3, most=total)
            self._slots, self._slot_rows = 3, max(rows, run_rows)
        self._rows = stream.empty(self._slots * self._slot_rows)
        starts = range(0, total, self._slot_rows)
        self.sizes = [min(self._slot_rows, total - start) for start in starts]
        self._turn = 0
        self._filled = 0

    def fill(self) -> range:
        """Fill the next window, and return where its rows are."""
        size = self._next_size
        self.fill_ahead(size)
        start = self._next_start
        self._turn += 1
        self._filled = 0
        return range(start, start + size)

    def fill_ahead(self, count: int) -> None:
        """Fill some of the next window, as far as there is room."""
        count = min(count, self._next_size - self._filled)
        first = self._next_start + self._filled
        self._stream.copy_to(self._rows, first, first + count)
        self._filled += count

    def take(self, positions: Array) -> Rows:
        """Return a copy of the rows at some positions."""
        return self._rows.take(positions, self._stream.memory)

    @property
    def _next_size(self) -> int:
        return self.sizes[self._turn % len(self.sizes)]

    @property
    def _next_start(self) -> int:
        return self._turn % self._slots * self._slot_rows


def _shuffled_pass(
    windows: _Windows, runs: Sequence[tuple[int, ...]], rng: np.random.Generator, is_last: bool
) -> Iterator[Run]:
    waiting = late = np.empty(0, np.intp)
    remaining = iter(runs)
    run = next(remaining, None)
    last = len(windows.sizes) - 1
    for number in range(len(windows.sizes)):
        where = windows.fill()
        order = where.start + rng.permutation(len(where))
        leaving = len(order) if number == last else len(order) // 2
        waiting = np.concatenate([waiting, _interleave(late, order[:leaving])])
        late = order[leaving:]
        start = 0
        while run is not None and start + sum(run) <= len(waiting):
            positions = waiting[start : start + sum(run)]
            yield Run(windows.take(positions), run)
            start += len(positions)
            if not (is_last and number == last):
                windows.fill_ahead(len(positions))
            run = next(remaining, None)
        waiting = waiting[start:]


def _interleave(first: Array, second: Array) -> Array:
    """Return the entries of both, each in its order, as evenly mixed as their numbers allow."""
    if not len(first):
        return second
    merged = np.empty(len(first) + len(second), first.dtype)
    places = np.arange(len(first)) * len(merged) // len(first)
    others = np.ones(len(merged), bool)
    others[places] = False
    merged[places] = first
    merged[others] = second
    return merged
