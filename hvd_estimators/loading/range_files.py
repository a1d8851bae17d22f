"""The Parquet files of a store, opened for the row ranges that are read of them. Runs on ranks.

PyArrow opens local files by itself. Of others, the columns of a row group are fetched in few
requests (see `FetchedFile`), and those of the next ranges while this one is decoded.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyarrow import parquet
from typing_extensions import Self

from hvd_estimators.data.footers import FileFooter, FooterCache
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.data.remote_reads import FETCHED_BYTES, FetchedFile
from hvd_estimators.loading.interleave import PART_BYTES, RangeRead
from hvd_estimators.store.base import Store

__all__ = ["AHEAD_BYTES", "OPEN_BYTES", "WHOLE_BYTES", "RangeFiles"]

WHOLE_BYTES = 4 * PART_BYTES
"""Stored bytes of a row group's columns that are fetched at once; larger ones come in pieces.

What Spark writes by default, row groups of 128 MiB before they are compressed, mostly fits.
"""

OPEN_BYTES = WHOLE_BYTES
"""Such bytes of all row groups that are read at the same time, a slice of each in turn."""

AHEAD_BYTES = WHOLE_BYTES
"""Such bytes that are fetched before they are asked for."""

_AHEAD_RANGES = 4
_REQUESTS = 16
"""Requests at a time."""

_LOCAL_FOOTERS = 64


class RangeFiles:
    """Opens the files that row ranges lie in, for several threads. A context manager.

    Parameters
    ----------
    store : Store
        Where the files are.
    specs : sequence of ColumnSpec
        The columns to read.
    footers : FooterCache, optional
        The footers of the store's files that are known. Default: none, and nobody else is to know
        those that are read here.
    """

    def __init__(
        self, store: Store, specs: Sequence[ColumnSpec], footers: FooterCache | None = None
    ) -> None:
        self.specs = specs
        self.footers = footers or FooterCache(store)
        self._store = store
        self._names = [name for spec in specs for name in spec.stored_names]
        # Text stays as it is stored: as a few values that many rows may share.
        self._text = [spec.name for spec in specs if spec.kind == "text"]
        self._local_footers: OrderedDict[str, parquet.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._announced: deque[_Announced] = deque()
        self._ahead: deque[tuple[RangeRead, FetchedFile]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        # What is open stays in the process that opened it.
        return RangeFiles, (self._store, self.specs, self.footers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Fetch nothing more, and forget what was fetched for later."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._announced.clear()
            ahead = list(self._ahead)
            self._ahead.clear()
        for _, file in ahead:
            file.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def open(self, slices: RangeRead) -> Iterator[parquet.ParquetFile]:
        """Open the file of a row range, to read its row group once by `range_tables`."""
        path = slices.row_range.file
        local = self._store.local_path(path)
        if local is not None:
            with parquet.ParquetFile(
                local,
                metadata=self._local_footer(path),
                buffer_size=FETCHED_BYTES,
                pre_buffer=False,
                read_dictionary=self._text,
            ) as file:
                self._keep(path, file.metadata)
                yield file
            return
        footer = self.footers.get(path)
        with contextlib.closing(self._fetched(slices, footer)) as source:
            self._advance()
            # Not closed by PyArrow, which did not open it.
            yield parquet.ParquetFile(
                source,
                metadata=footer.metadata,
                buffer_size=0 if source.whole else FETCHED_BYTES,
                pre_buffer=False,
                read_dictionary=self._text,
            )

    def announce(self, slices: RangeRead) -> None:
        """Say that a range will be opened, after those that were announced before.

        As soon as there is room for it, it is fetched. Does nothing where files are local.
        """
        path = slices.row_range.file
        if self._store.local_path(path) is not None:
            return
        footer = self._running().submit(self.footers.get, path)
        with self._lock:
            self._announced.append(_Announced(slices, footer))
        footer.add_done_callback(lambda _: self._advance())

    def tails(self, ranges: Iterable[RangeRead]) -> dict[str, bytes]:
        """Return the ends of the files of some ranges, for `FooterCache.add` in another process."""
        paths = dict.fromkeys(slices.row_range.file for slices in ranges)
        remote = [path for path in paths if self._store.local_path(path) is None]
        if not remote:
            return {}
        return dict(zip(remote, self._running().map(self.footers.tail, remote), strict=True))

    def ahead(self, bundles: Iterator[tuple[RangeRead, ...]]) -> Iterator[tuple[RangeRead, ...]]:
        """Yield bundles of ranges that are opened in their order, and announce some beforehand."""
        waiting: deque[tuple[RangeRead, ...]] = deque()
        for bundle in bundles:
            for slices in bundle:
                self.announce(slices)
            waiting.append(bundle)
            if sum(map(len, waiting)) > _AHEAD_RANGES:
                yield waiting.popleft()
        yield from waiting

    def _fetched(self, slices: RangeRead, footer: FileFooter) -> FetchedFile:
        """Return what was fetched of a range beforehand, or begin to fetch it."""
        with self._lock:
            for entry in self._ahead:
                if entry[0] == slices:
                    self._ahead.remove(entry)
                    return entry[1]
            for announced in self._announced:
                if announced.slices == slices:
                    self._announced.remove(announced)
                    break
        return self._fetch(slices, footer)

    def _advance(self) -> None:
        """Fetch the next ranges that were announced, as long as there is room."""
        with self._lock:
            while self._announced and self._pool is not None:
                slices, footer = self._announced[0].slices, self._announced[0].footer
                if not footer.done():
                    return
                if not footer.cancelled() and footer.exception() is None:
                    taken = sum(file.held_bytes for _, file in self._ahead)
                    chunks = self._chunks(slices, footer.result())
                    needed = min(sum(stop - start for start, stop in chunks), _share(slices))
                    if taken and taken + needed > AHEAD_BYTES:
                        return
                    self._ahead.append((slices, self._fetch(slices, footer.result())))
                # Who opens a file whose footer cannot be read gets the error.
                self._announced.popleft()

    def _fetch(self, slices: RangeRead, footer: FileFooter) -> FetchedFile:
        return FetchedFile(
            self._store,
            slices.row_range.file,
            self._chunks(slices, footer),
            footer.end,
            _share(slices),
            self._pool or self._running(),
        )

    def _chunks(self, slices: RangeRead, footer: FileFooter) -> list[tuple[int, int]]:
        group = slices.row_range.row_group
        # Who reads a row group that is no more there gets the error.
        return footer.chunks(group, self._names) if group < footer.metadata.num_row_groups else []

    def _running(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS, "hvd_estimators requests")
            return self._pool

    def _local_footer(self, path: str) -> parquet.FileMetaData | None:
        with self._lock:
            return self._local_footers.get(path)

    def _keep(self, path: str, footer: parquet.FileMetaData) -> None:
        with self._lock:
            self._local_footers[path] = footer
            while len(self._local_footers) > _LOCAL_FOOTERS:
                self._local_footers.popitem(last=False)


@dataclass(frozen=True)
class _Announced:
    """A range that will be opened, and the footer of its file, which is being read."""

    slices: RangeRead
    footer: Future[FileFooter]


def _share(slices: RangeRead) -> int:
    """Return how many bytes of a range are held at a time."""
    return min(WHOLE_BYTES, OPEN_BYTES // slices.together)
