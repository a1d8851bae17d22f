"""Which rank reads which rows, and how many of them in each step: pure arithmetic.

Every rank computes the same numbers from the same plan, so nothing has to be exchanged to know
how many rows the other ranks see in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_estimators.data.manifest import RowGroup
from hvd_estimators.exceptions import DataError

__all__ = ["RowRange", "ShardPlan", "batch_sizes", "plan_shards"]


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` (inclusive) to ``stop`` (exclusive) of one row group."""

    file: str
    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows in the range."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardPlan:
    """The rows of each rank, in stored order.

    Attributes
    ----------
    shards : tuple of tuple of RowRange
        ``shards[rank]`` is what that rank reads in one pass over the data. Together the shards
        hold every row exactly once, and two ranks differ by at most one row.
    """

    shards: tuple[tuple[RowRange, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the plan was made for."""
        return len(self.shards)

    def rows(self, rank: int) -> int:
        """Return the number of rows that a rank reads in one pass."""
        return sum(row_range.rows for row_range in self.shards[rank])

    def steps(self, batch_size: int) -> int:
        """Return the number of steps, the same on all ranks, in which one pass is made."""
        return -(-max(self.rows(rank) for rank in range(self.num_ranks)) // batch_size)

    def batch_sizes(self, rank: int, batch_size: int) -> list[int]:
        """Return the rows of each step of one rank; see `batch_sizes`."""
        return batch_sizes(self.rows(rank), self.steps(batch_size), batch_size)

    def global_batch_sizes(self, batch_size: int) -> list[int]:
        """Return the rows of each step over all ranks."""
        per_rank = [self.batch_sizes(rank, batch_size) for rank in range(self.num_ranks)]
        return [sum(sizes) for sizes in zip(*per_rank, strict=True)]


def batch_sizes(rows: int, steps: int, batch_size: int) -> list[int]:
    """Cut rows into a number of batches: full ones first, and no batch empty if that can be.

    Parameters
    ----------
    rows : int
        Rows to cut, at most ``steps * batch_size``.
    steps : int
        Number of batches.
    batch_size : int
        Rows in a full batch.

    Returns
    -------
    list of int
        ``steps`` sizes, each from 0 to ``batch_size``, that add up to ``rows``.
    """
    sizes = []
    for steps_left in range(steps, 0, -1):
        size = min(batch_size, max(rows - (steps_left - 1), min(rows, 1)))
        sizes.append(size)
        rows -= size
    return sizes


def plan_shards(
    row_groups: Sequence[RowGroup], num_ranks: int, *, allow_empty: bool = False
) -> ShardPlan:
    """Cut row groups, in stored order, into one contiguous shard per rank.

    Row groups are cut where a rank's share ends inside one: the two ranks that meet there both
    read it and each keeps its part.

    Parameters
    ----------
    row_groups : sequence of RowGroup
        The dataset's row groups in stored order.
    num_ranks : int
        Number of ranks, at least 1.
    allow_empty : bool
        Accept fewer rows than ranks (validation): some ranks then have none.

    Returns
    -------
    ShardPlan
        Shards whose sizes differ by at most one row.

    Raises
    ------
    DataError
        If there are fewer rows than ranks and ``allow_empty`` is not set.
    """
    total = sum(group.rows for group in row_groups)
    if total < num_ranks and not allow_empty:
        raise DataError(
            f"The dataset has {total} rows, fewer than the {num_ranks} ranks that are to train "
            f"on it: each rank needs at least one. Set num_proc to {max(total, 1)} or less."
        )
    bounds = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    shards: list[list[RowRange]] = [[] for _ in range(num_ranks)]
    rank = offset = 0
    for group in row_groups:
        start = 0
        while start < group.rows:
            while offset == bounds[rank + 1]:
                rank += 1
            stop = min(group.rows, start + bounds[rank + 1] - offset)
            shards[rank].append(RowRange(group.file, group.index, start, stop))
            offset += stop - start
            start = stop
    return ShardPlan(tuple(tuple(shard) for shard in shards))
