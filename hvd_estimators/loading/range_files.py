"""Access to a store's Parquet files for reading row ranges. Runs on ranks.

PyArrow opens local files directly. From remote files, the columns of a row group are fetched in a
few requests (see `FetchedFile`). The next ranges are fetched while the current one is decoded.
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
"""Maximum stored bytes of a row group's columns for a fetch at once; larger ones are split.

Spark's default row groups, 128 MiB before compression, are mostly smaller.
"""

OPEN_BYTES = WHOLE_BYTES
"""Maximum fetched bytes of all row groups that are interleaved."""

AHEAD_BYTES = WHOLE_BYTES
"""Maximum bytes that are prefetched."""

_AHEAD_RANGES = 4
_REQUESTS = 16
"""Maximum number of parallel requests."""

_LOCAL_FOOTERS = 64


class RangeFiles:
    """Context manager that opens the files of row ranges, for several threads.

    Parameters
    ----------
    store : Store
        The store of the files.
    specs : sequence of ColumnSpec
        The columns to read.
    footers : FooterCache, optional
        Cache of known footers. Default: a new, private cache.
    """

    def __init__(
        self, store: Store, specs: Sequence[ColumnSpec], footers: FooterCache | None = None
    ) -> None:
        self.specs = specs
        self.footers = footers or FooterCache(store)
        self._store = store
        self._names = [name for spec in specs for name in spec.stored_names]
        # Keep text dictionary-encoded, because many rows may share a few values.
        self._text = [spec.name for spec in specs if spec.kind == "text"]
        self._local_footers: OrderedDict[str, parquet.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._announced: deque[_Announced] = deque()
        self._ahead: deque[tuple[RangeRead, FetchedFile]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        # Open files and threads stay in the process that created them.
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
        """Stop fetching and release prefetched bytes."""
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
        """Open the file of a row range, for one read of its row group by `range_tables`."""
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
            # Not used as a context manager, because PyArrow does not close a file that it did not
            # open.
            yield parquet.ParquetFile(
                source,
                metadata=footer.metadata,
                buffer_size=0 if source.whole else FETCHED_BYTES,
                pre_buffer=False,
                read_dictionary=self._text,
            )

    def announce(self, slices: RangeRead) -> None:
        """Announce a range that will be opened after all earlier announced ranges.

        The range is fetched as soon as the prefetch limit allows it. Does nothing for local files.
        """
        path = slices.row_range.file
        if self._store.local_path(path) is not None:
            return
        footer = self._running().submit(self.footers.get, path)
        with self._lock:
            self._announced.append(_Announced(slices, footer))
        footer.add_done_callback(lambda _: self._advance())

    def tails(self, ranges: Iterable[RangeRead]) -> dict[str, bytes]:
        """Return the file ends of some ranges, for `FooterCache.add` in another process."""
        paths = dict.fromkeys(slices.row_range.file for slices in ranges)
        remote = [path for path in paths if self._store.local_path(path) is None]
        if not remote:
            return {}
        return dict(zip(remote, self._running().map(self.footers.tail, remote), strict=True))

    def ahead(self, bundles: Iterator[tuple[RangeRead, ...]]) -> Iterator[tuple[RangeRead, ...]]:
        """Yield groups of ranges unchanged, and announce upcoming ranges before they are opened."""
        waiting: deque[tuple[RangeRead, ...]] = deque()
        for bundle in bundles:
            for slices in bundle:
                self.announce(slices)
            waiting.append(bundle)
            if sum(map(len, waiting)) > _AHEAD_RANGES:
                yield waiting.popleft()
        yield from waiting

    def _fetched(self, slices: RangeRead, footer: FileFooter) -> FetchedFile:
        """Return the prefetched file of a range, or start to fetch it."""
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
        """Fetch announced ranges in order, within the prefetch limit."""
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
                # If the footer cannot be read, opening the file raises the error.
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
        # If the row group no longer exists, reading it raises the error.
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
    """A range that will be opened, and the pending footer of its file."""

    slices: RangeRead
    footer: Future[FileFooter]


def _share(slices: RangeRead) -> int:
    """Return the maximum number of bytes of a range in memory."""
    return min(WHOLE_BYTES, OPEN_BYTES // slices.together)
