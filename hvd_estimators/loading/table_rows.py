"""Rows of Arrow tables in slots, for the shuffle buffer: values of any type and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hvd_estimators.data.arrays import Array
from hvd_estimators.data.rows import ROWS, RowTable
from hvd_estimators.exceptions import DataError
from hvd_estimators.loading.blocks import BlockLayout, BufferPool, Rows

_MOST_PIECES = 64
"""Number of pieces above which small ones are joined, since a selection takes from each piece."""

_MOST_JOINED_BYTES = 64 * 2**20


class _Pieces:
    """Tables that hold the rows of slots.

    Attributes
    ----------
    tables : list of pyarrow.Table or None
        The tables; None for one whose rows have all left.
    """

    def __init__(self) -> None:
        self.tables: list[pa.Table | None] = []

    def add(self, table: pa.Table) -> int:
        """Add a table, and return its number."""
        first = next((t for t in self.tables if t is not None), table)
        if table.schema != first.schema:
            # Files may have different types, such as large lists and lists.
            try:
                table = table.cast(first.schema)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
                raise DataError(
                    f"The files have different types: {first.schema.to_string()} and "
                    f"{table.schema.to_string()} ({error}). Write all files with one type."
                ) from error
        free = [number for number, each in enumerate(self.tables) if each is None]
        if free:
            self.tables[free[0]] = table
            return free[0]
        self.tables.append(table)
        return len(self.tables) - 1


class TableRows(Rows):
    """Slots for rows of Arrow tables, in place of blocks.

    A slot refers to a row of a table. A table is replaced by a copy of its used rows once less than
    half of them are used, so that memory is bounded.

    Parameters
    ----------
    pieces : _Pieces
        The tables, which slices share.
    piece, row : array
        Table of each slot, and row in it; -1 for an empty slot.
    """

    def __init__(self, pieces: _Pieces, piece: Array, row: Array) -> None:
        super().__init__(BlockLayout((), ()), ())
        self._pieces = pieces
        self._piece = piece
        self._row = row

    @staticmethod
    def of_size(rows: int) -> TableRows:
        """Return empty slots."""
        return TableRows(_Pieces(), np.full(rows, -1, np.int64), np.zeros(rows, np.int64))

    def __len__(self) -> int:
        return len(self._piece)

    @property
    def row_bytes(self) -> int:
        """Mean size of a row in bytes."""
        tables = [table for table in self._pieces.tables if table is not None]
        rows = sum(table.num_rows for table in tables)
        return sum(table.nbytes for table in tables) // max(rows, 1)

    def columns(self) -> dict[str, Any]:
        """Return the rows as the column `ROWS`."""
        return {ROWS: RowTable(self._taken(...))}

    def slice(self, start: int, stop: int) -> TableRows:
        """Return a view of some slots."""
        return TableRows(self._pieces, self._piece[start:stop], self._row[start:stop])

    def take(self, positions: Array, memory: BufferPool) -> TableRows:
        """Return a copy of the rows in some slots, in that order."""
        if len(self._pieces.tables) > _MOST_PIECES:
            self._compact()
        pieces = _Pieces()
        pieces.add(self._taken(positions))
        rows = np.arange(len(positions))
        return TableRows(pieces, np.zeros_like(rows), rows)

    def fill(self, columns: Mapping[str, Any]) -> None:
        """Fill all slots."""
        self._put(..., columns)

    def put(self, positions: Array, columns: Mapping[str, Any], memory: BufferPool) -> None:
        """Fill some slots, one per row of the column `ROWS`."""
        self._put(positions, columns)
        self._compact()

    def _put(self, positions: Any, columns: Mapping[str, Any]) -> None:
        table = columns[ROWS].table
        self._piece[positions] = self._pieces.add(table)
        self._row[positions] = np.arange(table.num_rows)

    def _taken(self, positions: Any) -> pa.Table:
        piece, row = self._piece[positions], self._row[positions]
        used = np.unique(piece)
        if not len(used):
            return next((t for t in self._pieces.tables if t is not None), pa.table({})).slice(0, 0)
        if len(used) == 1:
            table, start, end = self._table(used[0]), row[0], row[0] + len(row)
            if np.array_equal(row, np.arange(start, end)):
                return table.slice(start, len(row))
            return table.take(pa.array(row))
        order = np.argsort(piece, kind="stable")
        ends = np.searchsorted(piece[order], used, side="right")
        parts, start = [], 0
        for number, end in zip(used, ends, strict=True):
            parts.append(self._table(number).take(pa.array(row[order[start:end]])))
            start = end
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return pa.concat_tables(parts).combine_chunks().take(pa.array(places))

    def _table(self, number: int) -> pa.Table:
        table = self._pieces.tables[number]
        assert table is not None
        return table

    def _compact(self) -> None:
        """Release unused rows, and join small tables if there are many."""
        tables = self._pieces.tables
        used = np.bincount(self._piece + 1, minlength=len(tables) + 1)[1:]
        for number, table in enumerate(tables):
            if table is not None and not used[number]:
                tables[number] = None
            elif table is not None and 2 * used[number] < table.num_rows:
                self._join([number])
        kept = [number for number, table in enumerate(tables) if table is not None]
        if len(kept) > _MOST_PIECES:
            kept.sort(key=lambda number: self._table(number).nbytes)
            sizes = np.cumsum([self._table(number).nbytes for number in kept])
            self._join(kept[: max(int(np.searchsorted(sizes, _MOST_JOINED_BYTES)), 2)])

    def _join(self, numbers: Sequence[int]) -> None:
        """Replace tables by one with the rows that slots refer to."""
        slots = np.flatnonzero(np.isin(self._piece, numbers))
        table = self._taken(slots)
        for number in numbers:
            self._pieces.tables[number] = None
        self._put(slots, {ROWS: RowTable(table)})
