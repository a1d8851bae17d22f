"""Data module that reads with PyArrow only, in threads, for any versions of PyArrow and NumPy."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from hvd_estimators.data.arrays import Columns, table_to_columns
from hvd_estimators.loading.interleave import InterleaveGroup, RangeRead, interleave, range_tables
from hvd_estimators.loading.range_files import RangeFiles
from hvd_estimators.loading.reader import PlannedDataModule

__all__ = ["ArrowDataModule"]


class ArrowDataModule(PlannedDataModule):
    """Data module that reads row groups with PyArrow in threads, which decode without the GIL.

    ``reader_pool_type="process"`` behaves like ``"thread"``. With ``"dummy"``, the calling thread
    reads. Each worker holds at most one unconsumed table of a row group (see `range_tables`).
    """

    short_name = "arrow"

    def read(
        self, passes: Iterator[Sequence[InterleaveGroup]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges in threads; see `PlannedDataModule.read`."""

        def read(slices: RangeRead) -> Generator[tuple[Columns, bool], None, None]:
            with files.open(slices) as file:
                for table, ends_slice in range_tables(file, slices, self.columns):
                    yield table_to_columns(table, self.columns, slices.row_range.file), ends_slice

        bundles = (bundle for bundles in passes for bundle in bundles)
        with RangeFiles(self.store, self.columns, self.footers) as files:
            if self.reader_pool_type == "dummy":
                yield from interleave(bundles, read, 0)
            else:
                yield from interleave(files.ahead(bundles), read, workers)
