"""Reading several row groups at a time, some rows of each in turn: the order and the threads.

The order is the same for all readers, and does not depend on how many threads they have.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from hvd_estimators.loading.readers.ranges import PART_BYTES, Slices
from hvd_estimators.loading.sharding import RowRange

__all__ = ["Bundle", "in_turns", "mixed", "one_by_one"]

Bundle = tuple[Slices, ...]
"""Row ranges that are read together, a slice of each in turn."""

T = TypeVar("T")
_Stream = Generator[tuple[T, bool], None, None]

_LEAST_SLICE = 2**16
_ROUNDS = 4
"""How many times the slices of all open row groups fit into the shuffle buffer."""


def one_by_one(ranges: Iterable[RowRange]) -> list[Bundle]:
    """Return bundles of one range each."""
    return [(Slices(row_range),) for row_range in ranges]


def mixed(
    ranges: Sequence[RowRange],
    open_groups: int,
    row_bytes: int,
    buffer_bytes: int,
    rng: np.random.Generator,
) -> list[Bundle]:
    """Put a rank's row ranges in random order, several at a time.

    Each bundle has one of every few neighbours in the stored order, and ends with all of its
    ranges at about the same time: its rows, and those of each of its rounds, are a sample of all.

    Parameters
    ----------
    ranges : sequence of RowRange
        In stored order.
    open_groups : int
        Ranges of a bundle, at most.
    row_bytes : int
        Size of a row.
    buffer_bytes : int
        Size of the shuffle buffer; a round takes a part of it.
    rng : numpy.random.Generator
        Source of chance.
    """
    if open_groups == 1 or len(ranges) == 1:
        return one_by_one(ranges[i] for i in rng.permutation(len(ranges)))
    count = -(-len(ranges) // open_groups)
    bundles: list[list[RowRange]] = [[] for _ in range(count)]
    for first in range(0, len(ranges), count):
        neighbours = ranges[first : first + count]
        for number, row_range in zip(rng.permutation(count), neighbours, strict=False):
            bundles[number].append(row_range)
    share = buffer_bytes // _ROUNDS // min(open_groups, len(ranges))
    most = min(max(share, _LEAST_SLICE), PART_BYTES)
    result = []
    for bundle in bundles:
        rounds = -(-max(row_range.rows for row_range in bundle) * max(row_bytes, 1) // most)
        order = (bundle[i] for i in rng.permutation(len(bundle)))
        result.append(tuple(Slices(r, -(-r.rows // rounds), len(bundle)) for r in order))
    return result


def in_turns(
    bundles: Iterator[Bundle],
    read: Callable[[Slices], _Stream[T]],
    threads: int,
) -> Generator[T, None, None]:
    """Read bundles one after another, and of each bundle a slice of every range in turn.

    Parameters
    ----------
    bundles : iterator of Bundle
        May have no end; drawn from as reading goes on.
    read : callable
        Reads a range: yields its parts, and whether each is the last of a slice.
    threads : int
        Threads that read ahead; each has a part that waits to be taken, at most. 0: this thread
        reads, when it is asked to.
    """
    if not threads:
        for bundle in bundles:
            with contextlib.closing(_Ring(bundle, read)) as ring:
                yield from ring.parts()
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="hvd_estimators reader")
    rings: deque[_Ring[T]] = deque()
    try:
        while True:
            waiting = sum(len(ring.ahead) for ring in rings)
            for ring in rings:
                waiting += ring.read_ahead(pool, threads + 1 - waiting)
            while waiting <= threads:
                following = list(itertools.islice(bundles, 1))
                if not following:
                    break
                rings.append(_Ring(following[0], read))
                waiting += rings[-1].read_ahead(pool, threads + 1 - waiting)
            if not rings:
                return
            if not rings[0].ahead:
                rings.popleft()
                continue
            part = rings[0].take(pool)
            if part is not None:
                yield part
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for ring in rings:
            ring.close()


class _Ring(Generic[T]):
    """The ranges of a bundle, while they are read."""

    def __init__(self, bundle: Bundle, read: Callable[[Slices], _Stream[T]]) -> None:
        self._waiting = deque(read(slices) for slices in bundle)
        self.ahead: deque[tuple[_Stream[T], Future[tuple[T, bool] | None]]] = deque()

    def read_ahead(self, pool: ThreadPoolExecutor, most: int) -> int:
        """Let threads read from the ranges whose turn is next; return from how many."""
        count = max(min(most, len(self._waiting)), 0)
        for _ in range(count):
            stream = self._waiting.popleft()
            self.ahead.append((stream, pool.submit(next, stream, None)))
        return count

    def take(self, pool: ThreadPoolExecutor) -> T | None:
        """Return the next part, or None if a range turns out to have ended."""
        stream, future = self.ahead.popleft()
        found = future.result()
        if found is None:
            return None
        part, ends_slice = found
        if ends_slice:
            self._waiting.append(stream)
        else:
            self.ahead.appendleft((stream, pool.submit(next, stream, None)))
        return part

    def parts(self) -> Iterator[T]:
        """Read in this thread."""
        while self._waiting:
            stream = self._waiting[0]
            for part, ends_slice in stream:
                yield part
                if ends_slice:
                    self._waiting.append(stream)
                    break
            self._waiting.popleft()

    def close(self) -> None:
        """Close what is open. By then no thread is reading."""
        for stream in [*self._waiting, *(stream for stream, _ in self.ahead)]:
            stream.close()
