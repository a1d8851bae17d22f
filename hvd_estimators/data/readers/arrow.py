"""Reading with PyArrow alone, in threads: runs with any PyArrow and NumPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hvd_estimators.data.columns import Columns, table_to_columns
from hvd_estimators.data.readers.base import PlannedDataModule
from hvd_estimators.data.readers.ranges import RangeFiles, range_tables
from hvd_estimators.data.sharding import RowRange

__all__ = ["ArrowDataModule"]


class ArrowDataModule(PlannedDataModule):
    """Reads row groups with PyArrow, in threads: PyArrow decodes without the interpreter's lock.

    Takes ``reader_pool_type="process"`` for ``"thread"``; ``"dummy"`` reads in the thread that
    asks. Files are opened through fsspec, with ``storage_options``. A worker holds one part of a
    row group (see `range_tables`) that waits to be taken.
    """

    short_name = "arrow"

    def read(
        self, passes: Iterator[Sequence[RowRange]], workers: int
    ) -> Generator[Columns, None, None]:
        """Read row ranges in threads; see `PlannedDataModule.read`."""
        files = RangeFiles(self.storage_options or {})
        ranges = (row_range for ranges in passes for row_range in ranges)
        if self.reader_pool_type == "dummy":
            for row_range in ranges:
                yield from self._read_range(row_range, files)
            return
        pool = ThreadPoolExecutor(workers, thread_name_prefix="hvd_estimators reader")
        reading: deque[tuple[Iterator[Columns], Future[Columns | None]]] = deque()
        try:
            while True:
                while len(reading) <= workers and (ahead := next(ranges, None)) is not None:
                    parts = self._read_range(ahead, files)
                    reading.append((parts, pool.submit(next, parts, None)))
                if not reading:
                    return
                parts, future = reading.popleft()
                part = future.result()
                if part is not None:
                    # The next part of this row range comes before those of the following ones.
                    reading.appendleft((parts, pool.submit(next, parts, None)))
                    yield part
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _read_range(self, row_range: RowRange, files: RangeFiles) -> Iterator[Columns]:
        with files.open(row_range.file) as file:
            for table in range_tables(file, row_range, self.columns):
                yield table_to_columns(table, self.columns, row_range.file)
