"""Assignment of rows to shards and steps. Pure arithmetic.

A shard is the data of one rank. If a run has fewer ranks than shards, a rank runs several virtual
shards one after another. Every rank computes the same numbers from the same plan. No communication
is therefore needed to know the number of rows of other ranks in a step.
"""

from __future__ import annotations

import array
import collections
import functools
import itertools
import pickle
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from hvd_estimators.data.manifest import ColumnSpec, RowGroup, RowRange
from hvd_estimators.exceptions import DataError

_ENOUGH_GROUPS = 8
"""Minimum number of row groups that must contribute to a global batch for good mixing."""


def order_warning(
    row_groups: Sequence[RowGroup], plan: ShardPlan, specs: Sequence[ColumnSpec], buffer_bytes: int
) -> str | None:
    """Return a warning if the rows of the files cannot be mixed in the available memory.

    Rows are mixed well if a rank's rows fit into its buffer, or if all ranks together read enough
    row groups at a time. Otherwise, sorted rows are trained on almost in sorted order.

    Parameters
    ----------
    row_groups : sequence of RowGroup
        The row groups of the training part.
    plan : ShardPlan
        The assignment of rows to shards.
    specs : sequence of ColumnSpec
        The columns.
    buffer_bytes : int
        Size of a rank's shuffle buffer in bytes.

    Returns
    -------
    str or None
        The warning, or None.
    """
    row_bytes = plan.row_bytes_of(specs)
    rank_bytes = max(map(plan.rows, range(plan.num_shards))) * row_bytes
    read_together = sum(min(plan.open_groups, len(shard)) for shard in plan.shards)
    if rank_bytes <= 2 * buffer_bytes or read_together >= _ENOUGH_GROUPS:
        return None
    rows = max(group.rows for group in row_groups)
    return (
        f"Training rows lie in {len(row_groups)} row groups of up to {rows} rows "
        f"({_mib(rows * row_bytes)} in memory), of which all ranks together read {read_together} "
        f"at a time; a rank has {_mib(rank_bytes)} to read, and shuffle_buffer_size is "
        f"{_mib(buffer_bytes)}. If the rows are sorted, they are trained on nearly in that order. "
        "Write them again, with hvd_estimators.prepare_data or in smaller row groups (of 16 MiB, "
        "for example: parquet.block.size in Spark, row_group_size in rows in PyArrow), or set "
        "shuffle_buffer_size to more bytes."
    )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


MOST_OPEN_GROUPS = 64
"""Maximum number of row groups that a rank reads at a time; each needs an open file."""


def vary(specs: Iterable[ColumnSpec]) -> bool:
    """Return whether the columns do not tell the size of a row in memory."""
    return any(spec.kind in ("text", "rows", "any") for spec in specs)


@dataclass(frozen=True)
class ShardPlan:
    """The rows of each shard.

    Attributes
    ----------
    shards : sequence of tuple of RowRange
        Row ranges that each shard reads in one pass over the data, in stored order. Together, the
        shards contain every row exactly once. Their sizes differ by at most one row.
    open_groups : int
        Number of row groups of a shard that are interleaved if rows are shuffled.
    min_batch_rows : int
        Rows that each batch of a shard has if its rows suffice; see `BatchSizes`.
    row_bytes : int
        Mean size of a row in memory, see `RowGroup.num_bytes`.
    """

    shards: Sequence[tuple[RowRange, ...]]
    open_groups: int = 1
    min_batch_rows: int = 1
    row_bytes: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # Ranks receive the plan of all shards, and unpack their own.
        packed = [_pack(shard) for shard in self.shards]
        options = self.open_groups, self.min_batch_rows, self.row_bytes
        return _unpickled, (packed, self._rows, *options)

    def row_bytes_of(self, specs: Iterable[ColumnSpec]) -> int:
        """Return the mean bytes of a row in memory."""
        specs = tuple(specs)
        return sum(spec.row_bytes for spec in specs) + self.varying_bytes_of(specs)

    def varying_bytes_of(self, specs: Iterable[ColumnSpec]) -> int:
        """Return the mean bytes of a row that only the files tell: of text and any values."""
        specs = tuple(specs)
        if not vary(specs):
            return 0
        return max(self.row_bytes - sum(s.row_bytes for s in specs if s.kind != "rows"), 0)

    @property
    def num_shards(self) -> int:
        """Number of canonical shards: the number of ranks for which the plan was made."""
        return len(self.shards)

    def rows(self, shard: int) -> int:
        """Return the number of rows of a shard."""
        return self._rows[shard]

    @property
    def total_rows(self) -> int:
        """Number of rows of all shards."""
        return sum(self._rows)

    def steps(self, batch_size: int) -> int:
        """Return the number of steps in one pass, which is the same for all shards."""
        return -(-max(self._rows) // batch_size)

    def batches(self, shard: int, batch_size: int) -> int:
        """Return the number of a shard's batches with rows; other shards may have more."""
        # A shard with fewer rows than steps has batches of one row. The other steps are left out.
        return min(self.steps(batch_size), self.rows(shard))

    @functools.cached_property
    def _rows(self) -> list[int]:
        return [sum(row_range.rows for row_range in shard) for shard in self.shards]

    def batch_sizes(self, shards: Iterable[int], batch_size: int) -> BatchSizes:
        """Return the number of rows in each step of a pass, over some shards."""
        rows, steps = map(self.rows, shards), self.steps(batch_size)
        return BatchSizes(rows, steps, batch_size, self.min_batch_rows)

    def global_batch_sizes(self, batch_size: int) -> BatchSizes:
        """Return the number of rows in each step of a pass, over all shards."""
        return self.batch_sizes(range(self.num_shards), batch_size)


class _PackedShards(Sequence[tuple[RowRange, ...]]):
    """Shards in few bytes, each of which is unpacked when it is first needed."""

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed
        self._unpacked: dict[int, tuple[RowRange, ...]] = {}

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> tuple[RowRange, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[RowRange, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[RowRange, ...] | list[tuple[RowRange, ...]]:
        indices = range(len(self))[index]
        if isinstance(indices, range):
            return [self[each] for each in indices]
        if indices not in self._unpacked:
            self._unpacked[indices] = _unpack(self._packed[indices])
        return self._unpacked[indices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


def _unpickled(packed: Sequence[bytes], rows: list[int], *options: int) -> ShardPlan:
    plan = ShardPlan(_PackedShards(packed), *options)
    plan.__dict__["_rows"] = rows  # so that no shard is unpacked to count its rows
    return plan


_PLACES = ("row_group", "start", "stop", "footer")


def _pack(shard: Sequence[RowRange]) -> bytes:
    """Return some 20 bytes per range, because neighbouring names of files are alike."""
    files = [part.file for part in shard]
    places = [array.array("q", [getattr(part, name) for part in shard]) for name in _PLACES]
    return zlib.compress(pickle.dumps((files, places)), 1)


def _unpack(packed: bytes) -> tuple[RowRange, ...]:
    files, places = pickle.loads(zlib.decompress(packed))
    return tuple(map(RowRange, files, *places))


def virtual_shards(num_shards: int, rank: int, size: int) -> tuple[int, ...]:
    """Return the virtual shards that a rank runs in each step: ``rank``, ``rank + size`` ..."""
    return tuple(range(rank, num_shards, size))


def micro_batches_per_step(num_shards: int, size: int) -> int:
    """Return the number of micro-batches per step: the most shards of a rank."""
    return -(-num_shards // size)


class BatchSizes(Sequence[int]):
    """Number of rows in each step of a pass, over some shards.

    A shard's full batches come first. No batch is empty if the shard has a row for each step. Sizes
    are computed when they are needed, because a pass may have millions of steps.

    Parameters
    ----------
    rows : iterable of int
        Rows of each shard, at most ``steps * batch_size``.
    steps : int
        Number of steps.
    batch_size : int
        Rows in a full batch of a shard.
    min_rows : int
        Rows in the smallest batch of a shard that has as many rows for each step. A full batch must
        have more.
    """

    def __init__(self, rows: Iterable[int], steps: int, batch_size: int, min_rows: int = 1) -> None:
        self._steps = steps
        self._shards = [
            (_runs(of_shard, steps, batch_size, min_rows), number)
            for of_shard, number in collections.Counter(rows).items()
        ]

    def before(self, step: int) -> int:
        """Return the number of rows in the steps before ``step``, from 0 to the number of steps."""
        rows = 0
        for runs, number in self._shards:
            left = step
            for size, steps in runs:
                rows += number * size * min(left, steps)
                left -= min(left, steps)
        return rows

    @property
    def total(self) -> int:
        """Number of rows in all steps."""
        return self.before(self._steps)

    def distinct(self) -> set[int]:
        """Return the different sizes of the batches of single shards."""
        return {size for runs, _ in self._shards for size, _ in runs}

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[int]:
        shards = [
            itertools.chain.from_iterable([itertools.repeat(number * size, n) for size, n in runs])
            for runs, number in self._shards
        ]
        return shards[0] if len(shards) == 1 else map(sum, zip(*shards, strict=True))

    @overload
    def __getitem__(self, step: int) -> int: ...
    @overload
    def __getitem__(self, step: slice) -> list[int]: ...
    def __getitem__(self, step: int | slice) -> int | list[int]:
        steps = range(self._steps)[step]
        if isinstance(steps, range):
            return [self[at] for at in steps]
        return self.before(steps + 1) - self.before(steps)


def _runs(rows: int, steps: int, batch_size: int, least: int) -> list[tuple[int, int]]:
    """Return the sizes of a shard's batches, each with the number of steps that have the size."""
    if rows < least * steps or batch_size <= least:
        least = 1
    if rows <= steps:
        runs = [(1, rows), (0, steps - rows)]
    else:
        # Each step needs some rows; the first ones also take the others.
        full, rest = divmod(rows - least * steps, batch_size - least)
        runs = [(batch_size, full), (least + rest, min(steps - full, 1)), (least, steps - full - 1)]
    return [(size, number) for size, number in runs if number > 0]


def plan_shards(
    row_groups: Sequence[RowGroup],
    num_shards: int,
    *,
    allow_empty: bool = False,
    seed: int | None = None,
    open_bytes: int = 0,
) -> ShardPlan:
    """Split row groups into shards.

    Without a seed, shards are contiguous. With a seed, each shard gets about one of every
    ``num_shards`` neighbouring row groups. It is then a sample of all rows, even if the rows are
    sorted. If a shard ends inside a row group, the group is split. Both ranks read the group, and
    each keeps its own rows.

    Parameters
    ----------
    row_groups : sequence of RowGroup
        The dataset's row groups in stored order.
    num_shards : int
        Number of shards, at least 1. Equals the number of ranks at the start of a run.
    allow_empty : bool
        Accept fewer rows than shards (validation); some shards are then empty.
    seed : int, optional
        Seed for the random assignment of row groups to shards.
    open_bytes : int
        Memory for interleaved row groups of a shard in bytes; see `RowGroup.open_bytes`. With 0,
        row groups are read one after another.

    Returns
    -------
    ShardPlan
        Shards whose sizes differ by at most one row.

    Raises
    ------
    DataError
        If there are fewer rows than shards and ``allow_empty`` is False.
    """
    total = sum(group.rows for group in row_groups)
    if total < num_shards and not allow_empty:
        raise DataError(
            f"The dataset has {total} rows, fewer than the {num_shards} ranks that are to train "
            f"on it: each rank needs at least one. Set num_proc to {max(total, 1)} or less."
        )
    bounds = [total * shard // num_shards for shard in range(num_shards + 1)]
    shards: list[list[RowRange]] = [[] for _ in range(num_shards)]
    current = offset = 0
    for group in row_groups if seed is None else _dealt(row_groups, num_shards, seed):
        start = 0
        while start < group.rows:
            while offset == bounds[current + 1]:
                current += 1
            stop = min(group.rows, start + bounds[current + 1] - offset)
            shards[current].append(RowRange(group.file, group.index, start, stop, group.footer))
            offset += stop - start
            start = stop
    if seed is not None:
        order = {(group.file, group.index): i for i, group in enumerate(row_groups)}
        for shard in shards:
            shard.sort(key=lambda part: order[part.file, part.row_group])
    largest = max((group.open_bytes for group in row_groups), default=0)
    open_groups = min(max(open_bytes // max(largest, 1), 1), MOST_OPEN_GROUPS)
    row_bytes = sum(group.num_bytes for group in row_groups) // max(total, 1)
    return ShardPlan(tuple(map(tuple, shards)), open_groups, row_bytes=row_bytes)


def _dealt(row_groups: Sequence[RowGroup], num_shards: int, seed: int) -> list[RowGroup]:
    """Assign row groups randomly, one to each shard per round; return them shard by shard."""
    rng = np.random.default_rng([seed, num_shards])
    hands: list[list[RowGroup]] = [[] for _ in range(num_shards)]
    for first in range(0, len(row_groups), num_shards):
        shards = rng.permutation(num_shards)
        for shard, group in zip(shards, row_groups[first : first + num_shards], strict=False):
            hands[shard].append(group)
    return [group for hand in hands for group in hand]
