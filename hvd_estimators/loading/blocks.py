"""Blocks of columns: scalar columns of one dtype share an array, so rows are selected together."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array, Columns
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import DataError

_ALIGNMENT = 64
_MOST_BUFFERS = 8
"""Maximum number of buffers in a pool."""

_MOST_TABLES = 64
"""Number of tables above which their rows are copied to one, since a selection takes from each."""

_OBJECT_BYTES = 64
"""Memory of a Python string besides its characters, including NumPy's pointer to it."""

_TILE_BYTES = 2**18
"""Bytes of a block that are filled column by column; small enough for the CPU cache."""

_TILE_ROWS = 2**9
"""Minimum number of rows that are filled column by column, because each column costs a call."""

_MANY_COLUMNS = 10
"""Number of columns from which transposing is faster than filling a block column by column."""


@dataclass(frozen=True)
class BlockLayout:
    """Assignment of columns to blocks.

    Attributes
    ----------
    groups : tuple of tuple of str
        Names of the columns of each block. Several columns form a block of shape ``(rows,
        columns)``. A single column is its own block of shape ``(rows, *shape)``.
    names : tuple of str
        All columns, in their original order.
    """

    groups: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]

    @staticmethod
    def of(columns: Columns) -> BlockLayout:
        """Return the layout of columns: scalars of the same dtype together, others alone."""
        by_dtype: dict[str, list[str]] = {}
        for name, array in columns.items():
            alone = array.ndim != 1 or array.dtype.hasobject
            by_dtype.setdefault(f"column {name}" if alone else str(array.dtype), []).append(name)
        return BlockLayout(tuple(map(tuple, by_dtype.values())), tuple(columns))


class BufferPool:
    """Pool of array memory that reuses a buffer when all its arrays are released.

    New memory costs a page fault every 4 KiB, which takes longer than filling the memory. Threads
    may share a pool.

    Parameters
    ----------
    new_buffer : callable, optional
        Allocates a buffer of a given number of bytes. Default: `fresh_buffer`.
    """

    def __init__(self, new_buffer: Callable[[int], memoryview] | None = None) -> None:
        self._new_buffer = new_buffer or fresh_buffer
        self._lock = threading.Lock()
        self._buffers: list[tuple[memoryview, weakref.ref[Array]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an uninitialized array."""
        size = math.prod(shape) * dtype.itemsize
        if not size or dtype.hasobject:
            return np.empty(shape, dtype)
        # The lock prevents other threads from taking the same free buffer.
        with self._lock:
            position = len(self._buffers)
            buffer = None
            for i, (candidate, given_out) in enumerate(self._buffers):
                if size <= len(candidate) <= 2 * size and given_out() is None:
                    position, buffer = i, candidate
                    break
            buffer = buffer or self._new_buffer(size + size // 4)
            # Views of this array, and views of those, keep this array alive, because it does not
            # own its memory.
            array = np.frombuffer(buffer, dtype, math.prod(shape))
            self._buffers[position : position + 1] = [(buffer, weakref.ref(array))]
            del self._buffers[:-_MOST_BUFFERS]
        return array.reshape(shape)


class Rows:
    """Rows in blocks. Selecting and slicing takes one operation per block, not per column.

    Parameters
    ----------
    layout : BlockLayout
        Assignment of columns to blocks.
    blocks : sequence of ndarray
        One block per group of the layout. Rows are the first axis of all blocks.
    """

    __slots__ = ("blocks", "layout")

    def __init__(self, layout: BlockLayout, blocks: Sequence[Array]) -> None:
        self.layout = layout
        self.blocks = list(blocks)

    @staticmethod
    def of(columns: Columns) -> Rows:
        """Wrap columns without a copy, each as its own block."""
        layout = BlockLayout(tuple((name,) for name in columns), tuple(columns))
        return Rows(layout, list(columns.values()))

    @staticmethod
    def empty(like: Columns, layout: BlockLayout, rows: int, memory: BufferPool) -> Rows:
        """Return uninitialized blocks for a number of rows with the columns of ``like``."""
        blocks = []
        for group in layout.groups:
            array = like[group[0]]
            row_shape = array.shape[1:] if len(group) == 1 else (len(group),)
            blocks.append(memory.empty((rows, *row_shape), array.dtype))
        return Rows(layout, blocks)

    def columns(self) -> dict[str, Array]:
        """Return views of the columns by name; columns that share a block are strided."""
        arrays: dict[str, Array] = {}
        for group, block in zip(self.layout.groups, self.blocks, strict=True):
            if len(group) == 1:
                arrays[group[0]] = block
            else:
                arrays.update(zip(group, block.T, strict=True))
        if len(self.layout.groups) == 1:
            return arrays
        return {name: arrays[name] for name in self.layout.names}

    def __len__(self) -> int:
        return len(self.blocks[0])

    def slice(self, start: int, stop: int) -> Rows:
        """Return a view of some rows."""
        return Rows(self.layout, [block[start:stop] for block in self.blocks])

    def take(self, positions: Array, memory: BufferPool) -> Rows:
        """Return a copy of the rows at some positions, in that order.

        All positions must be in range.
        """
        blocks = []
        for block in self.blocks:
            target = memory.empty((len(positions), *block.shape[1:]), block.dtype)
            # Without "clip", NumPy gathers into a temporary buffer first.
            np.take(_records(block), positions, axis=0, out=_records(target), mode="clip")
            blocks.append(target)
        return Rows(self.layout, blocks)

    def fill(self, columns: Columns) -> None:
        """Overwrite these rows with columns of the same length.

        Raises
        ------
        DataError
            If the shape or dtype of a column does not match these rows.
        """
        self._check(columns)
        for group, block in zip(self.layout.groups, self.blocks, strict=True):
            if len(group) == 1:
                block[...] = columns[group[0]]
                continue
            tile = _tile_rows(block)
            for start in range(0, len(block), tile):
                _pack(columns, group, start, block[start : start + tile])

    def put(self, positions: Array, columns: Columns, memory: BufferPool) -> None:
        """Copy columns to the rows at some positions, one position per row.

        Raises
        ------
        DataError
            See `fill`.
        """
        self._check(columns)
        for group, block in zip(self.layout.groups, self.blocks, strict=True):
            records = _records(block)
            if len(group) == 1:
                array = columns[group[0]]
                records[positions] = (
                    array if records is block else _records(np.ascontiguousarray(array))
                )
                continue
            tile = memory.empty((min(_tile_rows(block), len(positions)), len(group)), block.dtype)
            for start in range(0, len(positions), len(tile)):
                some = positions[start : start + len(tile)]
                _pack(columns, group, start, tile[: len(some)])
                records[some] = _records(tile[: len(some)])

    def _check(self, columns: Columns) -> None:
        for group, block in zip(self.layout.groups, self.blocks, strict=True):
            for name in group:
                row_shape = block.shape[1:] if len(group) == 1 else ()
                column = columns[name]
                if (column.shape[1:], column.dtype) != (row_shape, block.dtype):
                    raise DataError(
                        f"Column {name!r} has rows of shape {column.shape[1:]} and type "
                        f"{column.dtype} after others of shape {row_shape} and type {block.dtype}.",
                        column=name,
                    )


class TableRows(Rows):
    """Slots for rows of Arrow tables, in place of blocks.

    A slot refers to a row of a table. When the tables have grown by half, the rows that slots refer
    to are copied to one table, so that memory is bounded.

    Parameters
    ----------
    tables : list of pyarrow.Table
        The tables, which slices share.
    table, row : array
        Number of each slot's table, and row in it; -1 for an empty slot.
    """

    def __init__(self, tables: list[pa.Table], table: Array, row: Array) -> None:
        super().__init__(BlockLayout((), ()), ())
        self._tables = tables
        self._table = table
        self._row = row
        self._num_bytes = self._copied_bytes = 0

    @staticmethod
    def of_size(rows: int) -> TableRows:
        """Return empty slots."""
        return TableRows([], np.full(rows, -1, np.int64), np.zeros(rows, np.int64))

    def __len__(self) -> int:
        return len(self._table)

    def columns(self) -> dict[str, Any]:
        """Return the rows as the column `ROWS`."""
        return {ROWS: RowTable(self._taken(slice(None)))}

    def slice(self, start: int, stop: int) -> TableRows:
        """Return a view of some slots."""
        return TableRows(self._tables, self._table[start:stop], self._row[start:stop])

    def take(self, positions: Array, memory: BufferPool) -> TableRows:
        """Return a copy of the rows in some slots, in that order."""
        table = self._taken(positions)
        rows = np.arange(table.num_rows)
        return TableRows([table], np.zeros_like(rows), rows)

    def fill(self, columns: Mapping[str, Any]) -> None:
        """Fill all slots."""
        self._put(slice(None), columns[ROWS].table)

    def put(self, positions: Array, columns: Mapping[str, Any], memory: BufferPool) -> None:
        """Fill some slots, one per row of the column `ROWS`."""
        self._put(positions, columns[ROWS].table)
        self._num_bytes += self._tables[-1].nbytes
        if 2 * self._num_bytes > 3 * self._copied_bytes or len(self._tables) > _MOST_TABLES:
            slots = np.flatnonzero(self._table >= 0)
            table = self._taken(slots)
            self._tables.clear()
            self._put(slots, table)
            self._num_bytes = self._copied_bytes = table.nbytes

    def _put(self, positions: Any, table: pa.Table) -> None:
        if self._tables and table.schema != self._tables[0].schema:
            # Files may have different types, such as large lists and lists.
            schema = self._tables[0].schema
            try:
                table = table.cast(schema)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
                raise DataError(
                    f"The files have different types: {schema.to_string()} and "
                    f"{table.schema.to_string()} ({error}). Write all files with one type."
                ) from error
        self._tables.append(table)
        self._table[positions] = len(self._tables) - 1
        self._row[positions] = np.arange(table.num_rows)

    def _taken(self, positions: Any) -> pa.Table:
        number, row = self._table[positions], self._row[positions]
        used = np.unique(number)
        if not len(used):
            return self._tables[0].slice(0, 0) if self._tables else pa.table({})
        if len(used) == 1:
            table = self._tables[used[0]]
            if np.array_equal(row, np.arange(row[0], row[0] + len(row))):
                return table.slice(row[0], len(row))
            return table.take(pa.array(row))
        order = np.argsort(number, kind="stable")
        parts = [self._tables[n].take(pa.array(row[order][number[order] == n])) for n in used]
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return pa.concat_tables(parts).combine_chunks().take(pa.array(places))


def row_bytes(columns: Columns, varying_bytes: int) -> int:
    """Return the approximate size of a row in bytes, which is the same for all parts of a run.

    Parameters
    ----------
    columns : Columns
        Any rows.
    varying_bytes : int
        Mean bytes of a row's text, or of a row of any length. Counts if the columns have these.
    """
    num_bytes, varies = 0, False
    for array in columns.values():
        is_table = isinstance(array, RowTable)
        varies = varies or is_table or array.dtype.hasobject
        if not is_table:
            itemsize = _OBJECT_BYTES if array.dtype.hasobject else array.itemsize
            num_bytes += math.prod(array.shape[1:]) * itemsize
    return num_bytes + varying_bytes * varies


def _tile_rows(block: Array) -> int:
    return max(_TILE_BYTES // (block.itemsize * block.shape[1]), _TILE_ROWS)


def _pack(columns: Columns, names: Sequence[str], start: int, tile: Array) -> None:
    """Copy rows of several columns, from ``start`` on, into a tile of a block."""
    many = len(names) >= _MANY_COLUMNS
    # In a block of many columns, consecutive values of a column are far apart, so each write
    # touches another cache line. Therefore the columns are joined first and then transposed by
    # NumPy, which writes sequentially.
    targets = np.empty((len(names), len(tile)), tile.dtype) if many else tile.T
    for target, name in zip(targets, names, strict=True):
        target[...] = columns[name][start : start + len(tile)]
    if many:
        tile[...] = targets.T


def fresh_buffer(size: int) -> memoryview:
    """Allocate an aligned buffer."""
    # NumPy requests huge pages from the system, which random access to a large buffer needs.
    # TensorFlow uses memory without a copy if its address is a multiple of 64.
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memoryview(memory[start : start + size])  # type: ignore[arg-type]


def _records(block: Array) -> Array:
    """View a block as one record per row, which NumPy copies as a unit."""
    size = block.itemsize * math.prod(block.shape[1:])
    if block.ndim == 1 or block.dtype.hasobject or not size or not len(block):
        return block
    return block.reshape(len(block), -1).view(f"V{size}")[:, 0]
