"""Paths and columns with special characters, and sparse columns."""

import numpy as np
import pyarrow as pa
import pytest
from numbered_rows import Dataset, current_reader, flat, take
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import ColumnSpec
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.store import LocalStore

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", ["with space", "a#b?c%20d", "day=2024-01-01", "[1]*"])
def test_paths_may_have_special_characters_of_urls_and_globs(tmp_path, name):
    dataset = Dataset(tmp_path / name, 6, files=2, row_group_size=2)

    assert flat(take(dataset, 2, shuffle=False)) == list(range(6))


def test_sparse_columns_are_read_as_dense_arrays(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3]], np.float32)
    stored = pa.table(
        {
            "v__indices": pa.array([[1], [], [0, 2]], pa.list_(pa.int32())),
            "v__values": pa.array([[2], [], [1, 3]], pa.list_(pa.float32())),
            "id": [0, 1, 2],
        }
    )
    parquet.write_table(stored, folder / "a.parquet", row_group_size=2)
    manifest = read_manifest(LocalStore(str(tmp_path)), str(folder), None, ["id"])

    with current_reader()(
        train_dir=str(folder),
        val_dir=None,
        columns=[ColumnSpec("v", "sparse", "float32", (3,))],
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=3,
        shuffle=False,
    ) as data:
        batch = next(data.train_data())

    np.testing.assert_array_equal(batch["v"], dense)


def test_columns_may_have_special_characters_of_regular_expressions(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    names = ["a.b", "a b", "a+b (c)", "class", "ü", "1st", "_x", "a"]
    table = pa.table({name: [float(i), 10.0 * i] for i, name in enumerate(names)})
    parquet.write_table(table.append_column("ab", [["x", "y"]]), folder / "a.parquet")
    manifest = read_manifest(LocalStore(str(tmp_path)), str(folder), None, names)

    with current_reader()(
        train_dir=str(folder),
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=2,
        shuffle=False,
    ) as data:
        batch = next(data.train_data())

    assert {name: array.tolist() for name, array in batch.items()} == table.to_pydict()
