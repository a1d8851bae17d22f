"""Reading of files that differ in their Arrow types."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.loading.interleave import one_per_group
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore


def test_rows_of_small_files_with_other_list_types_are_read(tmp_path: Any) -> None:
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
