"""Joining of small row ranges, and reading of files that differ in their Arrow types."""

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
from hvd_estimators.loading.interleave import join_small_ranges, one_per_group
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore

MIB = 2**20


def single(rows: int) -> tuple[RangeRead, ...]:
    return (RangeRead(RowRange("a", 0, 0, rows)),)


def shape(groups: list[Any]) -> list[list[list[int]]]:
    """Return the rows of each range in each element of each group."""
    return [[[read.row_range.rows for read in run] for run in group] for group in groups]


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        ([], 1, []),
        ([5, 6, 7], 1, [[[5, 6, 7]]]),
        ([1] * 20, 1, [[[1] * 16], [[1] * 4]]),
        ([2, 3, 3, 9, 1, 7, 1], MIB // 8, [[[2, 3, 3]], [[9]], [[1, 7]], [[1]]]),
    ],
)
def test_neighbours_are_joined_up_to_a_number_and_a_size(
    rows: list[int], row_bytes: int, expected: list[Any]
) -> None:
    assert shape(list(join_small_ranges(map(single, rows), row_bytes))) == expected


def test_interleaved_ranges_stay_apart() -> None:
    mixed = tuple(RangeRead(RowRange("a", i, 0, 4), 2, 2) for i in range(2))
    groups = [single(1), single(2), mixed, single(3)]
    assert shape(list(join_small_ranges(groups, 1))) == [[[1, 2]], [[4], [4]], [[3]]]


@given(st.lists(st.integers(1, 40), max_size=60), st.sampled_from([1, MIB // 100, MIB]))
def test_joining_keeps_all_ranges_in_order(rows: list[int], row_bytes: int) -> None:
    groups = [single(count) for count in rows]
    found = list(join_small_ranges(groups, row_bytes))
    assert [read for group in found for run in group for read in run] == [g[0] for g in groups]


def test_rows_of_small_files_with_other_list_types_are_joined(tmp_path: Any) -> None:
    """Each table has rows of several files, but only of one pass."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(12):
        kind = pa.list_ if number % 4 else pa.large_list
        values = pa.array([[number, i] for i in range(3)], kind(pa.int64()))
        parquet.write_table(pa.table({"x": values}), folder / f"{number:02}.parquet")
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
        expected = [[number, i] for number in range(12) for i in range(3)]
        assert [row for table in tables for row in table] == 2 * expected
        # Three files of one type follow each file of the other.
        assert [len(table) for table in tables] == 6 * [3, 9]
