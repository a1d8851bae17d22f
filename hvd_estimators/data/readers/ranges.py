"""One row range of a Parquet file as tables of bounded size: what a worker of any reader does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.sharding import RowRange
from hvd_estimators.exceptions import StoreError

__all__ = ["PART_BYTES", "RangeFiles", "range_tables"]

PART_BYTES = 16 * 2**20
"""Bytes, in memory, of the rows that are read at a time; one row can have more."""

_BUFFER_BYTES = 2**18
"""Bytes of a column that are fetched at a time, so that a large row group is never held whole."""

_FOOTERS = 64


def range_tables(
    file: parquet.ParquetFile, row_range: RowRange, specs: Sequence[ColumnSpec]
) -> Iterator[pa.Table]:
    """Yield the rows of a range, in stored order, in tables of at most about `PART_BYTES`.

    Parameters
    ----------
    file : pyarrow.parquet.ParquetFile
        The range's file, as `RangeFiles` opens it.
    row_range : RowRange
        Rows of one row group.
    specs : sequence of ColumnSpec
        The columns to read.

    Raises
    ------
    StoreError
        If the file does not hold these rows.
    """
    groups = file.metadata
    if (
        row_range.row_group >= groups.num_row_groups
        or groups.row_group(row_range.row_group).num_rows < row_range.stop
    ):
        raise StoreError(
            f"{row_range.file!r} does not hold the planned rows of row group "
            f"{row_range.row_group}: it was changed after training had begun. Train again, and "
            "leave the files as they are."
        )
    row_bytes = _row_bytes(groups.row_group(row_range.row_group), specs)
    batches = file.iter_batches(
        max(int(PART_BYTES / max(row_bytes, 1)), 1),
        row_groups=[row_range.row_group],
        columns=[name for spec in specs for name in spec.stored_names],
        use_threads=False,
    )
    position = 0
    for batch in batches:
        start, stop = row_range.start - position, row_range.stop - position
        position += batch.num_rows
        if start < batch.num_rows:
            rows = batch.slice(max(start, 0), min(stop, batch.num_rows) - max(start, 0))
            yield pa.Table.from_batches([rows])
        if stop <= batch.num_rows:
            return


def _row_bytes(group: Any, specs: Sequence[ColumnSpec]) -> float:
    """Return the size of a row, that of text as far as the footer tells."""
    size = sum(spec.width * np.dtype(spec.dtype).itemsize for spec in specs)
    text = {spec.name for spec in specs if spec.kind == "text"}
    columns = (group.column(i) for i in range(group.num_columns)) if text else ()
    stored = sum(c.total_uncompressed_size for c in columns if c.path_in_schema in text)
    return float(size + stored / max(group.num_rows, 1))


class RangeFiles:
    """Opens Parquet files through fsspec; remembers the footers of the latest ones."""

    def __init__(self, storage_options: Mapping[str, Any]) -> None:
        self._storage_options = storage_options
        self._footers: dict[str, parquet.FileMetaData] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[parquet.ParquetFile]:
        """Open a file, from a path or a URL, in the way `range_tables` asks for."""
        with self._lock:
            footer = self._footers.get(path)
        with contextlib.ExitStack() as stack:
            source = path
            if "://" in path:
                fs, path_in_fs = fsspec.core.url_to_fs(path, **self._storage_options)
                source = stack.enter_context(fs.open(path_in_fs, "rb"))
            file = stack.enter_context(
                parquet.ParquetFile(source, metadata=footer, buffer_size=_BUFFER_BYTES)
            )
            with self._lock:
                self._footers[path] = file.metadata
                while len(self._footers) > _FOOTERS:
                    del self._footers[next(iter(self._footers))]
            yield file
