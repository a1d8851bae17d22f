"""One row range of a Parquet file as tables of bounded size, as workers of all readers need it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute, parquet

from hvd_estimators.exceptions import StoreError
from hvd_estimators.loading.sharding import RowRange
from hvd_estimators.parquet.manifest import ColumnSpec

__all__ = ["PART_BYTES", "Slices", "range_tables"]

PART_BYTES = 16 * 2**20
"""Bytes in memory of the rows that are read at a time; a single row can have more."""


@dataclass(frozen=True)
class Slices:
    """A row range, to be read some rows at a time.

    Attributes
    ----------
    row_range : RowRange
        The range.
    rows : int or None
        Rows of a slice; slices begin at multiples of that in the row group. None: all rows are one
        slice.
    together : int
        How many row ranges are read at the same time, this one included.
    """

    row_range: RowRange
    rows: int | None = None
    together: int = 1


def range_tables(
    file: parquet.ParquetFile, slices: Slices, specs: Sequence[ColumnSpec]
) -> Iterator[tuple[pa.Table, bool]]:
    """Yield the rows of a range, in stored order, in tables of at most about `PART_BYTES`.

    That is the size of what they hold once it is decoded, also where one value stands for many in
    the file.

    Parameters
    ----------
    file : pyarrow.parquet.ParquetFile
        The range's file, as `hvd_estimators.loading.readers.files` opens it.
    slices : Slices
        Rows of one row group.
    specs : sequence of ColumnSpec
        The columns to read.

    Yields
    ------
    pyarrow.Table, bool
        Some rows of a slice, and whether they are the last of it.

    Raises
    ------
    StoreError
        If the file does not hold these rows.
    """
    row_range, groups = slices.row_range, file.metadata
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
        min(most, slices.rows or most),
        row_groups=[row_range.row_group],
        columns=[name for spec in specs for name in spec.stored_names],
        use_threads=False,
    )
    text = [spec.name for spec in specs if spec.kind == "text"]
    position = 0
    for batch in batches:
        start, stop = row_range.start - position, row_range.stop - position
        position += batch.num_rows
        if start >= batch.num_rows:
            continue
        rows = batch.slice(max(start, 0), min(stop, batch.num_rows) - max(start, 0))
        range_ends = stop <= batch.num_rows
        slice_ends = range_ends or (slices.rows is not None and position % slices.rows == 0)
        cuts = _cuts(rows, text)
        for first, last in itertools.pairwise(cuts):
            table = pa.Table.from_batches([rows.slice(first, last - first)])
            yield table, slice_ends and last == cuts[-1]
        if range_ends:
            return


def _row_bytes(groups: Any, row_range: RowRange, specs: Sequence[ColumnSpec]) -> float:
    """Return the size of a row as decoded by PyArrow; of text, the size that the footer tells.

    Text is decoded to its dictionary, so that it takes no more than in the file.
    """
    group = groups.row_group(row_range.row_group)
    size = sum(spec.width * np.dtype(spec.dtype).itemsize for spec in specs)
    text = {spec.name for spec in specs if spec.kind == "text"}
    columns = (group.column(i) for i in range(group.num_columns)) if text else ()
    stored = sum(c.total_uncompressed_size for c in columns if c.path_in_schema in text)
    return float(size + stored / max(group.num_rows, 1))


def _cuts(rows: pa.RecordBatch, text: Sequence[str]) -> list[int]:
    """Return where to cut rows so that each piece has `PART_BYTES` of text, or one row."""
    if not text:
        return [0, rows.num_rows]
    sizes = np.zeros(rows.num_rows, np.int64)
    for name in text:
        column = rows.column(rows.schema.get_field_index(name))
        if pa.types.is_dictionary(column.type):
            lengths = compute.binary_length(column.dictionary).fill_null(0).to_numpy()
            indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
            sizes += lengths[indices] if len(lengths) else 0
        else:
            sizes += compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    pieces = (np.cumsum(sizes) - sizes) // PART_BYTES
    return [0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), rows.num_rows]
