"""Whether the rows of files can be mixed as they are read. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_estimators.loading.sharding import ShardPlan
from hvd_estimators.parquet.manifest import ColumnSpec, RowGroup

__all__ = ["order_warning"]

_ENOUGH_GROUPS = 8
"""The least number of places in the stored order from which a global batch is taken."""


def order_warning(
    row_groups: Sequence[RowGroup],
    plan: ShardPlan,
    specs: Sequence[ColumnSpec],
    buffer_bytes: int,
) -> str | None:
    """Return a warning about files whose rows cannot be mixed in the available memory.

    Rows are mixed well if a rank's rows fit into its buffer, or if enough row groups are read at a
    time by all ranks together. Else rows that are sorted are trained on nearly in that order.

    Parameters
    ----------
    row_groups : sequence of RowGroup
        The training part's row groups.
    plan : ShardPlan
        Who reads what.
    specs : sequence of ColumnSpec
        The columns.
    buffer_bytes : int
        Size of a rank's shuffle buffer.

    Returns
    -------
    str or None
        The warning; None if all is well.
    """
    row_bytes = sum(spec.width * np.dtype(spec.dtype).itemsize for spec in specs)
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
