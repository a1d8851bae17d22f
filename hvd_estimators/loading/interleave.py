"""Interleaved reading of several row groups, with threads that read ahead.

The order of the rows is the same for all readers and does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Self, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from hvd_estimators.data.footers import damage_is_store_error
from hvd_estimators.data.manifest import ColumnSpec, RowRange, stored_names
from hvd_estimators.data.remote_reads import RangeFiles, RangeRead, decoded_bytes
from hvd_estimators.data.types import is_bytes, is_string
from hvd_estimators.exceptions import StoreError

T = TypeVar("T")
S = TypeVar("S")


class Prefetch(Generic[T]):
    """Iterator that reads a source in a thread, a bounded number of items ahead.

    `__next__` raises the errors of the source. If the source is a generator, the thread closes it.

    Parameters
    ----------
    source : iterator
        Consumed only by the thread.
    ahead : int
        Maximum number of items that wait for the consumer.
    name : str
        Name of the thread.
    """

    def __init__(self, source: Iterator[T], ahead: int, name: str) -> None:
        self._source = source
        self._ahead = ahead
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_closed = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._has_ended)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
        self.close()
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and wait for it. Any thread may call this method, at any time."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._source:
                with self._changed:
                    self._changed.wait_for(
                        lambda: len(self._items) < self._ahead or self._is_closed
                    )
                    if self._is_closed:
                        break
                    self._items.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        try:
            close = getattr(self._source, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()


PART_BYTES = 16 * 2**20
"""Target size in memory of the rows per read; a single row can be larger."""


def read_tables(files: RangeFiles, read: RangeRead) -> Generator[tuple[pa.Table, bool], None, None]:
    """Open the file of a range and yield its rows; see `range_tables`."""
    with files.open(read) as file:
        yield from range_tables(file, read, files.specs)


def range_tables(
    file: parquet.ParquetFile, read: RangeRead, specs: Sequence[ColumnSpec]
) -> Iterator[tuple[pa.Table, bool]]:
    """Yield the rows of a range in stored order, as tables of up to about `PART_BYTES`.

    The limit applies to the decoded size, even if the file stores repeated values only once.

    Parameters
    ----------
    file : pyarrow.parquet.ParquetFile
        The range's file, as opened by `hvd_estimators.data.remote_reads.RangeFiles`.
    read : RangeRead
        Rows of one row group.
    specs : sequence of ColumnSpec
        The columns to read.

    Yields
    ------
    pyarrow.Table, bool
        Rows of one slice, and whether the table ends the slice.

    Raises
    ------
    StoreError
        If the file does not contain these rows, or they are damaged.
    """
    row_range, groups = read.row_range, file.metadata
    if (
        row_range.row_group >= groups.num_row_groups
        or groups.row_group(row_range.row_group).num_rows < row_range.stop
    ):
        raise StoreError(
            f"{row_range.file!r} does not hold the planned rows of row group "
            f"{row_range.row_group}: it was changed after training had begun. Train again, and "
            "leave the files as they are."
        )
    most = max(int(PART_BYTES / max(_row_bytes(groups, row_range, specs), 1)), 1)
    batches = file.iter_batches(
        min(most, read.rows or most),
        row_groups=[row_range.row_group],
        columns=stored_names(specs),
        use_threads=False,
    )
    varying = _varying(specs)
    position = 0
    for batch in _readable(batches, row_range):
        start, stop = row_range.start - position, row_range.stop - position
        position += batch.num_rows
        if start >= batch.num_rows:
            continue
        rows = batch.slice(max(start, 0), min(stop, batch.num_rows) - max(start, 0))
        range_ends = stop <= batch.num_rows
        slice_ends = range_ends or (read.rows is not None and position % read.rows == 0)
        cuts = _cuts(rows, varying)
        for first, last in itertools.pairwise(cuts):
            table = pa.Table.from_batches([rows.slice(first, last - first)])
            yield table, slice_ends and last == cuts[-1]
        if range_ends:
            return


def _readable(batches: Iterator[pa.RecordBatch], row_range: RowRange) -> Iterator[pa.RecordBatch]:
    """Yield batches, and convert PyArrow's errors about damaged pages to a `StoreError`."""
    with damage_is_store_error(row_range.file, row_range.row_group):
        yield from batches


def _row_bytes(groups: Any, row_range: RowRange, specs: Sequence[ColumnSpec]) -> float:
    """Return the size of a row, in which text stays encoded; see `decoded_bytes`."""
    group = groups.row_group(row_range.row_group)
    size = sum(spec.row_bytes for spec in specs)
    text = _varying(specs)
    inner = tuple(f"{name}." for name in text)
    stored = 0
    for leaf in range(group.num_columns) if text else ():
        chunk = group.column(leaf)
        if chunk.path_in_schema in text or chunk.path_in_schema.startswith(inner):
            stored += decoded_bytes(chunk, groups, leaf)
    return float(size + stored / max(group.num_rows, 1))


def _varying(specs: Sequence[ColumnSpec]) -> tuple[str, ...]:
    """Return the names of the stored columns whose rows may differ in size."""
    return stored_names(spec for spec in specs if spec.kind in ("text", "rows"))


def _cuts(rows: pa.RecordBatch, names: Sequence[str]) -> list[int]:
    """Return the split points of rows so that each piece has `PART_BYTES` of text, or one row.

    The text is in some of the named columns.
    """
    if not names:
        return [0, rows.num_rows]
    sizes = np.zeros(rows.num_rows, np.int64)
    for name in names:
        column = rows.column(rows.schema.get_field_index(name))
        if pa.types.is_dictionary(column.type):
            lengths = compute.binary_length(column.dictionary).fill_null(0).to_numpy()
            indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
            sizes += lengths[indices] if len(lengths) else 0
        elif is_string(column.type) or is_bytes(column.type):
            sizes += compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    pieces = (np.cumsum(sizes) - sizes) // PART_BYTES
    return [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), rows.num_rows]


InterleaveGroup = tuple[RangeRead, ...]
"""Row ranges that are read together, one slice of each in turn."""


_Stream = Generator[tuple[T, bool], None, None]


_LEAST_SLICE = 2**16

_ROUNDS = 4
"""Number of rounds of slices, over all open row groups, that fit into the shuffle buffer."""


def one_per_group(ranges: Iterable[RowRange]) -> list[InterleaveGroup]:
    """Return groups of one range each."""
    return [(RangeRead(row_range),) for row_range in ranges]


_TOGETHER_BYTES = 2**20
"""Maximum decoded bytes of small ranges that a thread reads one after another."""

_MOST_TOGETHER = 64

_TASKS_PER_THREAD = 8
"""Number of tasks that each thread gets at least before ranges are put together."""


def together(
    groups: Sequence[InterleaveGroup], row_bytes: int, threads: int
) -> Iterator[list[tuple[RangeRead, ...]]]:
    """Yield groups in the same order, of ranges that one thread reads one after another.

    Consecutive groups of a single small range become one. Otherwise threads that hand over small
    files, one by one, mostly wait for Python's interpreter.

    Parameters
    ----------
    groups : sequence of InterleaveGroup
        The groups of one pass.
    row_bytes : int
        Size of a row in bytes.
    threads : int
        Number of threads that read.
    """
    most = min(len(groups) // (_TASKS_PER_THREAD * threads), _MOST_TOGETHER)
    ranges: list[RangeRead] = []
    num_bytes = 0
    for group in groups:
        size = sum(each.row_range.rows for each in group) * row_bytes
        is_full = len(ranges) >= most or num_bytes + size > _TOGETHER_BYTES
        if ranges and (is_full or len(group) > 1):
            yield [tuple(ranges)]
            ranges, num_bytes = [], 0
        if len(group) > 1:
            yield [(each,) for each in group]
        else:
            ranges.append(group[0])
            num_bytes += size
    if ranges:
        yield [tuple(ranges)]


def mixed(
    ranges: Sequence[RowRange],
    open_groups: int,
    row_bytes: int,
    buffer_bytes: int,
    rng: np.random.Generator,
) -> list[InterleaveGroup]:
    """Group a rank's row ranges in random order, several ranges per group.

    Each group takes one range from each run of neighbours in the stored order. All ranges of a
    group end at about the same time. Each group, and each round of its slices, is therefore a
    sample of all rows.

    Parameters
    ----------
    ranges : sequence of RowRange
        In stored order.
    open_groups : int
        Maximum number of ranges in a group.
    row_bytes : int
        Size of a row in bytes.
    buffer_bytes : int
        Size of the shuffle buffer in bytes; a round takes a fraction of it.
    rng : numpy.random.Generator
        Random number generator.
    """
    if open_groups == 1 or len(ranges) == 1:
        return one_per_group(ranges[i] for i in rng.permutation(len(ranges)))
    count = -(-len(ranges) // open_groups)
    groups: list[list[RowRange]] = [[] for _ in range(count)]
    for first in range(0, len(ranges), count):
        neighbours = ranges[first : first + count]
        for number, row_range in zip(rng.permutation(count), neighbours, strict=False):
            groups[number].append(row_range)
    share = buffer_bytes // _ROUNDS // min(open_groups, len(ranges))
    most = min(max(share, _LEAST_SLICE), PART_BYTES)
    result = []
    for group in groups:
        rounds = -(-max(row_range.rows for row_range in group) * max(row_bytes, 1) // most)
        order = (group[i] for i in rng.permutation(len(group)))
        result.append(tuple(RangeRead(r, -(-r.rows // rounds), len(group)) for r in order))
    return result


def interleave(
    groups: Iterator[Sequence[S]], read: Callable[[S], _Stream[T]], threads: int
) -> Generator[T, None, None]:
    """Read groups one after another; within a group, read one slice of each element in turn.

    Parameters
    ----------
    groups : iterator of sequence
        Groups of ranges, or of anything else that ``read`` takes; may be infinite. Consumed lazily.
    read : callable
        Reads an element. Yields its tables, each with a flag for the last table of a slice.
    threads : int
        Number of threads that read ahead; each has at most one unconsumed table.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hvd_estimators reader")
    interleavers: deque[_Interleaver[T]] = deque()
    try:
        while True:
            waiting = sum(len(interleaver.ahead) for interleaver in interleavers)
            for interleaver in interleavers:
                waiting += interleaver.read_ahead(pool, threads + 1 - waiting)
            while waiting <= threads:
                following = list(itertools.islice(groups, 1))
                if not following:
                    break
                interleavers.append(_Interleaver(following[0], read))
                waiting += interleavers[-1].read_ahead(pool, threads + 1 - waiting)
            if not interleavers:
                return
            if not interleavers[0].ahead:
                interleavers.popleft()
                continue
            part = interleavers[0].take(pool)
            if part is not None:
                yield part
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for interleaver in interleavers:
            interleaver.close()


class _Interleaver(Generic[T]):
    """The ranges of a group while they are read."""

    def __init__(self, group: Sequence[S], read: Callable[[S], _Stream[T]]) -> None:
        self._waiting = deque(map(read, group))
        self.ahead: deque[tuple[_Stream[T], Future[tuple[T, bool] | None]]] = deque()

    def read_ahead(self, pool: ThreadPoolExecutor, most: int) -> int:
        """Start reads of the next ranges in threads; return the number of started reads."""
        count = max(min(most, len(self._waiting)), 0)
        for _ in range(count):
            stream = self._waiting.popleft()
            self.ahead.append((stream, pool.submit(next, stream, None)))
        return count

    def take(self, pool: ThreadPoolExecutor) -> T | None:
        """Return the next table, or None if its range has ended."""
        stream, future = self.ahead.popleft()
        result = future.result()
        if result is None:
            return None
        part, ends_slice = result
        if ends_slice:
            self._waiting.append(stream)
        else:
            self.ahead.appendleft((stream, pool.submit(next, stream, None)))
        return part

    def close(self) -> None:
        """Close the open ranges. At this point, no thread is reading."""
        for stream in [*self._waiting, *(stream for stream, _ in self.ahead)]:
            stream.close()
