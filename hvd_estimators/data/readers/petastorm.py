"""Reading with Petastorm's readers and worker pools, row group by row group, as planned."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

with warnings.catch_warnings():
    # Petastorm 0.13 imports names that PyArrow 14 calls deprecated.
    warnings.simplefilter("ignore", FutureWarning)
    from petastorm.arrow_reader_worker import ArrowReaderWorker
    from petastorm.fs_utils import FilesystemResolver, get_filesystem_and_path_or_paths
    from petastorm.reader import Reader
    from petastorm.reader_impl.arrow_table_serializer import ArrowTableSerializer
    from petastorm.workers_pool import EmptyResultError
    from petastorm.workers_pool.dummy_pool import DummyPool
    from petastorm.workers_pool.process_pool import ProcessPool
    from petastorm.workers_pool.thread_pool import ThreadPool
    from petastorm.workers_pool.ventilator import Ventilator

from pyarrow import parquet

from hvd_estimators.data.columns import Columns, table_to_columns
from hvd_estimators.data.readers.base import PlannedDataModule
from hvd_estimators.data.sharding import RowRange
from hvd_estimators.exceptions import StoreError

__all__ = ["PetastormDataModule"]

_SEQUENCE = b"hvd_estimators.sequence"


class PetastormDataModule(PlannedDataModule):
    """Reads with Petastorm: a worker pool fetches row groups ahead of the training loop.

    Petastorm shards by whole row groups and in an order of its own. This reader keeps its
    `Reader`, worker pools and filesystems, and hands the workers the planned row ranges instead,
    so that each row is read once and the order depends on the seed alone.
    """

    short_name = "petastorm"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._open: set[_PlannedReader] = set()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop every reader that is still open."""
        for reader in list(self._open):
            self._close(reader)

    def read(self, passes: Iterator[Sequence[RowRange]], workers: int) -> Iterator[Columns]:
        """Read row ranges with a pool of Petastorm workers; see `PlannedDataModule.read`."""
        first = next(passes)
        # Every pass reads the same row groups, in another order.
        files = sorted({row_range.file for row_range in first})
        ranges = (row_range for ranges in _chain(first, passes) for row_range in ranges)
        names = [name for column in self.columns for name in column.stored_names]
        reader = self._open_reader(files, names, first, ranges, workers)
        self._open.add(reader)
        try:
            for table in _in_sequence(reader):
                yield table_to_columns(table, self.columns)
        finally:
            self._close(reader)

    def _close(self, reader: _PlannedReader) -> None:
        if reader in self._open:
            self._open.remove(reader)
            reader.stop()
            reader.join()

    def _open_reader(
        self,
        files: list[str],
        names: list[str],
        needed: Sequence[RowRange],
        ranges: Iterator[RowRange],
        workers: int,
    ) -> _PlannedReader:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if "://" in files[0]:
                filesystem, paths = get_filesystem_and_path_or_paths(
                    files, "libhdfs", storage_options=self.storage_options
                )
            else:
                # Not as URLs: Petastorm would cut a path at "?" or "#".
                filesystem, paths = FilesystemResolver("file:///").filesystem(), files
            return _PlannedReader(
                filesystem,
                paths,
                needed=needed,
                ranges=ranges,
                # Petastorm takes field names as regular expressions.
                schema_fields=[f"{re.escape(name)}$" for name in names],
                reader_pool=_make_pool(self.reader_pool_type, workers),
                worker_class=_RangeWorker,
                is_batched_reader=True,
            )


def _make_pool(pool_type: str, workers: int) -> Any:
    if pool_type == "thread":
        return ThreadPool(workers)
    if pool_type == "process":
        return ProcessPool(workers, ArrowTableSerializer())
    return DummyPool()


def _chain(
    first: Sequence[RowRange], rest: Iterator[Sequence[RowRange]]
) -> Iterator[Sequence[RowRange]]:
    yield first
    yield from rest


def _in_sequence(reader: _PlannedReader) -> Iterator[pa.Table]:
    """Yield tables in the order in which they were asked for; process pools answer in any."""
    early: dict[int, pa.Table] = {}
    wanted = 0
    for table in reader:
        early[int(table.schema.metadata[_SEQUENCE])] = table
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


class _PlannedReader(Reader):
    """Petastorm's reader with the plan's row ranges in the place of its own sharding."""

    def __init__(
        self,
        *args: Any,
        needed: Sequence[RowRange],
        ranges: Iterator[RowRange],
        **kwargs: Any,
    ) -> None:
        self._needed = needed
        self._ranges = ranges
        self._pieces: dict[tuple[str, int], int] = {}
        super().__init__(*args, **kwargs)

    def _filter_row_groups(
        self, dataset: Any, row_groups: Sequence[Any], *args: Any
    ) -> tuple[list[int], None]:
        for position, piece in enumerate(row_groups):
            self._pieces[piece.path, piece.row_group] = position
        for row_range in self._needed:
            if (row_range.file, row_range.row_group) not in self._pieces:
                raise _changed(row_range.file, row_range.row_group)
        return list(range(len(row_groups))), None

    def _create_ventilator(self, *args: Any) -> _RangeVentilator:
        in_flight = self._workers_pool.workers_count + 2
        return _RangeVentilator(self._workers_pool.ventilate, self._ranges, self._pieces, in_flight)


class _RangeVentilator(Ventilator):
    """Hands row ranges to the workers, a bounded number of them ahead of the consumer."""

    def __init__(
        self,
        ventilate: Any,
        ranges: Iterator[RowRange],
        pieces: dict[tuple[str, int], int],
        in_flight: int,
    ) -> None:
        super().__init__(ventilate)
        self._ranges = ranges
        self._pieces = pieces
        self._room = threading.Semaphore(in_flight)
        self._stopping = False
        self._ventilated = 0
        self._processed = 0
        self._all_ventilated = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def processed_item(self) -> None:
        self._processed += 1
        self._room.release()

    def completed(self) -> bool:
        # Pools ask when they are out of work, and stop reading if so. They may have looked before
        # the last range came to them: it has to be processed as well.
        return self._all_ventilated and self._processed == self._ventilated

    def stop(self) -> None:
        self._stopping = True
        self._room.release()
        self._thread.join()

    def _run(self) -> None:
        upcoming = next(self._ranges, None)
        self._all_ventilated = upcoming is None
        while (row_range := upcoming) is not None:
            upcoming = next(self._ranges, None)
            self._room.acquire()
            if self._stopping:
                return
            sequence = self._ventilated
            self._ventilated += 1
            # Before it goes out: once it is processed, nobody waits for another.
            self._all_ventilated = upcoming is None
            self._ventilate_fn(
                piece_index=self._pieces[row_range.file, row_range.row_group],
                start=row_range.start,
                stop=row_range.stop,
                sequence=sequence,
            )


class _RangeWorker(ArrowReaderWorker):
    """Reads one row range of one row group as an Arrow table."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._files: dict[str, parquet.ParquetFile] = {}

    @staticmethod
    def new_results_queue_reader() -> _TableQueueReader:
        return _TableQueueReader()

    def process(self, piece_index: int, start: int, stop: int, sequence: int) -> None:
        piece = self._split_pieces[piece_index]
        if piece.path not in self._files:
            self._files[piece.path] = parquet.ParquetFile(self._filesystem.open(piece.path))
        table = self._files[piece.path].read_row_group(
            piece.row_group, columns=list(self._schema.fields), use_threads=False
        )
        if table.num_rows < stop:
            raise _changed(piece.path, piece.row_group)
        table = table.slice(start, stop - start)
        self.publish_func(table.replace_schema_metadata({_SEQUENCE: str(sequence)}))


def _changed(file: str, row_group: int) -> StoreError:
    return StoreError(
        f"{file!r} does not hold the planned rows of row group {row_group}: it was changed after "
        "training had begun. Train again, and leave the files as they are."
    )


class _TableQueueReader:
    """Takes tables from the pool as they are, where Petastorm would go through pandas."""

    batched_output = True

    def read_next(self, workers_pool: Any, schema: Any, ngram: Any) -> pa.Table:
        try:
            return workers_pool.get_results()
        except EmptyResultError:
            raise StopIteration from None
