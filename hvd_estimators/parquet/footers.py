"""The footers of Parquet files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.exceptions import ColumnError, StoreError
from hvd_estimators.parquet.listing import DataFile, data_files
from hvd_estimators.parquet.tails import leaf_positions, read_tail
from hvd_estimators.store.base import Store

__all__ = ["Footer", "read_footers", "unreadable"]

_THREADS = 16


@dataclass(frozen=True)
class Footer:
    """A file's footer. It is read each time it is asked for, and never kept.

    Attributes
    ----------
    file : str
        The file's full path in the store.
    metadata : pyarrow.parquet.FileMetaData
        The footer itself.
    schema : pyarrow.Schema
        The columns as they are read.
    leaves : dict of str to range
        Column to the positions of the Parquet columns that hold it.
    partitions : dict of str to str
        Values from the part of the path below the dataset's.
    """

    file: str
    metadata: parquet.FileMetaData
    schema: pa.Schema
    leaves: dict[str, range]
    partitions: dict[str, str]

    def holds(self, name: str) -> bool:
        """Return whether the file itself holds a column; raise if it holds several."""
        count = len(self.schema.get_all_field_indices(name))
        if count > 1:
            raise ColumnError(
                f"The file {self.file!r} holds {count} columns named {name!r}; expected one. "
                "Rename the others."
            )
        return bool(count)

    def type(self, name: str) -> pa.DataType:
        """Return a column's Arrow type."""
        return self.schema.field(name).type

    def nulls(self, name: str) -> int:
        """Return how many nulls a column holds, as far as the writer recorded them."""
        return sum(
            statistics.null_count
            for group in range(self.metadata.num_row_groups)
            for leaf in self.leaves[name]
            if (statistics := self.metadata.row_group(group).column(leaf).statistics) is not None
            and statistics.has_null_count
        )


def read_footers(store: Store, path: str) -> list[Footer]:
    """Read the footers of all files under a path, as `data_files` lists them.

    Raises
    ------
    StoreError
        If there are no Parquet files, or a file is not Parquet.
    """
    files = data_files(store, path)
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda file: _read(store, file), files))


def _read(store: Store, file: DataFile) -> Footer:
    try:
        metadata = parquet.read_metadata(pa.BufferReader(read_tail(store, file.path)))
        schema = metadata.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error
    return Footer(file.path, metadata, schema, leaf_positions(schema), file.partitions)


def unreadable(file: str, error: Exception) -> StoreError:
    """Return the error that says that a file cannot be read, and what to do."""
    return StoreError(
        f"Expected a Parquet file, but PyArrow {pa.__version__} cannot read {file!r} ({error}). "
        "Write it again if it is damaged; move it away, or begin its name with '_', if it is not "
        "data. If Spark wrote lists in lists with spark.sql.parquet.writeLegacyFormat=true, write "
        "them without it."
    )
