"""Parquet files that tests train on, written from NumPy arrays. No Spark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet


def as_table(columns: Mapping[str, Any]) -> pa.Table:
    """Convert NumPy arrays to a table; two-dimensional arrays become list columns."""
    return pa.table(
        {
            name: pa.array(array if array.ndim == 1 else list(array))
            for name, array in columns.items()
        }
    )


def write_columns(
    folder: str | Path,
    columns: Mapping[str, Any],
    *,
    row_group_size: int | None = None,
    name: str = "part-0.parquet",
) -> None:
    """Write arrays of equal length as one file of a folder, which is created if it is missing."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    parquet.write_table(as_table(columns), Path(folder, name), row_group_size=row_group_size)


def damage_last_page(file: Path, row_group: int = 0) -> None:
    """Change one bit in the last byte of the first column of a row group."""
    column = parquet.read_metadata(file).row_group(row_group).column(0)
    pages = column.data_page_offset
    if column.has_dictionary_page:
        pages = min(pages, column.dictionary_page_offset)
    content = bytearray(file.read_bytes())
    content[pages + column.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
