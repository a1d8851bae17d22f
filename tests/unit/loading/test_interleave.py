"""Reading of files that differ in their Arrow types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import RowRange
from hvd_estimators.data.remote_reads import RangeRead
from hvd_estimators.loading.interleave import one_per_group, together
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore


@pytest.mark.parametrize("files", [12, 200])
def test_rows_of_small_files_with_other_list_types_are_read(tmp_path: Any, files: int) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(files):
        kind = pa.list_ if number % 4 else pa.large_list
        values = pa.array([[number, i] for i in range(3)], kind(pa.int64()))
        parquet.write_table(pa.table({"x": values}), folder / f"{number:03}.parquet")
    store = LocalStore(str(tmp_path))
    manifest = read_manifest(store, str(folder), None, ["x"])
    plan = plan_shards(manifest.train.row_groups, 1)
    for pool in ("thread", "dummy"):
        with ArrowDataModule(
            train_dir=str(folder),
            val_dir=None,
            columns=manifest.columns,
            train_plan=plan,
            reader_pool_type=pool,
            store=store,
        ) as module:
            passes = iter([one_per_group(plan.shards[0]) for _ in range(2)])
            tables = [part["x"].tolist() for part in module.read(passes, 2)]
        expected = [[number, i] for number in range(files) for i in range(3)]
        assert [row for table in tables for row in table] == 2 * expected


@given(
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=3), max_size=300),
    st.integers(1, 4),
)
def test_only_small_ranges_are_read_together_and_in_order(
    rows: list[list[int]], threads: int
) -> None:
    groups = [
        tuple(RangeRead(RowRange(f"{number}-{i}", 0, 0, n)) for i, n in enumerate(of_group))
        for number, of_group in enumerate(rows)
    ]
    found = list(together(groups, 1024, threads))
    assert [read for group in found for ranges in group for read in ranges] == [
        read for group in groups for read in group
    ]
    joined = [ranges for group in found for ranges in group if len(ranges) > 1]
    assert all(sum(read.row_range.rows for read in ranges) <= 1024 for ranges in joined)
    # Each thread has something to do, and groups of several ranges stay as they are.
    assert max(map(len, joined), default=1) <= max(len(rows) // (8 * threads), 1)
    assert [len(group) for group in found if len(group) > 1] == [n for n in map(len, rows) if n > 1]
