"""Existing files of Delta tables: only those of the current version are read."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from delta_tables import actions, commit, hide_rows, protocol
from deltalake import DeltaTable, write_deltalake
from foreign import read

from hvd_estimators import Store
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.tables import read_log
from hvd_estimators.exceptions import StoreError
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.versions

ROWS = pa.table({"x": [1.0, 2.0, 3.0, 4.0], "day": [1, 1, 2, 2]})


def load(path: str | Path, *names: str) -> dict[str, Any]:
    manifest = read_manifest(Store.create(str(path)), str(path), None, names)
    return read(manifest.train, manifest.columns)


def test_removed_files_are_not_read(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS, partition_by=["day"])
    write_deltalake(
        table, pa.table({"x": [7.0], "day": [2]}), mode="overwrite", predicate="day = 2"
    )
    write_deltalake(table, pa.table({"x": [9.0], "day": [3]}), mode="append")
    assert len(list(table.rglob("*.parquet"))) == 4

    found = load(table, "x", "day")

    order = np.argsort(found["x"])
    np.testing.assert_array_equal(found["x"][order], [1, 2, 7, 9])
    np.testing.assert_array_equal(found["day"][order], [1, 1, 2, 3])
    np.testing.assert_array_equal(load(table / "day=2", "x")["x"], [7])
    active = {Path(uri) for uri in DeltaTable(table).file_uris()}
    for file in table.rglob("*.parquet"):
        if file in active:
            assert load(file, "x")["x"].size
        else:
            with pytest.raises(StoreError, match="There are no Parquet files under"):
                load(file, "x")
    with pytest.raises(StoreError, match=r"holds '.*/table', a Delta table"):
        load(tmp_path, "x")


class SlowStore(LocalStore):
    """Store that lists a folder as slowly as a remote one."""

    def names(self, path: str) -> list[str]:
        time.sleep(0.02)
        return super().names(path)


def test_removed_files_of_several_partitions_are_not_read(tmp_path: Path) -> None:
    """Threads that look for the log of one table at once all find it."""
    table = tmp_path / "table"
    days = pa.table({"x": np.arange(12.0), "day": np.arange(12)})
    for _ in range(2):
        write_deltalake(table, days, partition_by=["day"], mode="overwrite")
    assert len(list(table.rglob("*.parquet"))) == 24
    folders = [str(table / f"day={day}") for day in range(12)]
    manifest = read_manifest(SlowStore(str(tmp_path)), folders, None, ["x"])
    assert manifest.train.rows == 12


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_log_of_a_remote_table_is_read_by_the_store(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    table = tmp_path / "table"
    for x in (1.0, 2.0, 3.0):
        write_deltalake(table, pa.table({"x": [x]}), mode="overwrite" if x == 2 else "append")
        if x == 2 and has_checkpoint:
            DeltaTable(table).create_checkpoint()
    url = f"memory://{table}"
    store = Store.create(url)
    for file in table.rglob("*"):
        # With the checkpoint, the first versions are not needed.
        needed = not (has_checkpoint and file.name.endswith(("0.json", "1.json")))
        if file.is_file() and needed:
            with store.open_atomic(f"{url}/{file.relative_to(table)}") as opened:
                opened.write(file.read_bytes())
    shutil.rmtree(table)

    log = read_log(store, "delta", url)

    assert len(log.files) == 2
    manifest = read_manifest(store, url, None, ["x"])
    assert {group.file for group in manifest.train.row_groups} == {*log.files}
    store.fs.rm(url, recursive=True)


def test_odd_partition_values_are_those_of_the_log(tmp_path: Path) -> None:
    values = ["a b", "c/d", "50%", "é=:", "100%25", None]
    rows = pa.table({"x": np.arange(6.0), "name": values})
    write_deltalake(tmp_path / "table", rows, partition_by=["name"])

    log = read_log(Store.create(str(tmp_path)), "delta", str(tmp_path / "table"))

    assert {file.values["name"] for file in log.files.values()} == set(values)
    assert all(Path(path).exists() for path in log.files)
    assert [file.rows for file in log.files.values()] == [1] * 6
    np.testing.assert_array_equal(np.sort(load(tmp_path / "table", "x")["x"]), np.arange(6.0))


@pytest.mark.parametrize("rows", [(1, 3), (0, 1, 2, 3)])
def test_rows_that_a_deletion_vector_hides_are_an_error(
    tmp_path: Path, rows: tuple[int, ...]
) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS)
    hide_rows(table, *rows)
    with pytest.raises(StoreError, match=r"deletion vectors hide rows .* APPLY \(PURGE\)"):
        load(table, "x")


def test_the_feature_without_deletion_vectors_is_no_error(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS)
    commit(table, protocol("deletionVectors", "columnMapping", "timestampNtz"))
    np.testing.assert_array_equal(np.sort(load(table, "x")["x"]), [1, 2, 3, 4])


def test_mapped_columns_are_an_error(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS)
    (metadata,) = [a["metaData"] for a in actions(table) if "metaData" in a]
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        named = {"id": number, "physicalName": f"col-{number}"}
        field["metadata"] = {f"delta.columnMapping.{key}": value for key, value in named.items()}
    mapped = {
        **metadata,
        "schemaString": json.dumps(schema),
        "configuration": {"delta.columnMapping.mode": "name"},
    }
    commit(table, protocol("columnMapping"), {"metaData": mapped})
    with pytest.raises(StoreError, match=r"column mapping by name.*\.load\(\".*/table\"\)\)"):
        load(table, "x")


def test_files_of_another_table_are_an_error(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS)
    (add,) = [a["add"] for a in actions(table) if "add" in a]
    commit(table, {"add": {**add, "path": f"file://{tmp_path}/other/{add['path']}"}})
    with pytest.raises(StoreError, match="files of another table"):
        load(table, "x")


def test_unknown_features_are_an_error(tmp_path: Path) -> None:
    table = tmp_path / "table"
    write_deltalake(table, ROWS)
    commit(table, protocol("fromTheFuture"))
    with pytest.raises(StoreError, match="fromTheFuture"):
        load(table, "x")


def test_without_deltalake_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "table", ROWS)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(StoreError, match=r"Run: pip install .*\[tables\].*Or train on its DataF"):
        load(tmp_path / "table", "x")
