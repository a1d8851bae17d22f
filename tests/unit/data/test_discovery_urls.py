"""Datasets at fsspec URLs, described and read through their store with each reader."""

import contextlib
import itertools

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data.discovery import first_rows, read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.exceptions import DataError, StoreError
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import FilesystemStore

pytestmark = pytest.mark.timeout(60)

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

DAYS, ROWS = 3, 20


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return an in-memory store with rows in three partitions and files without data."""
    root = f"memory://{tmp_path_factory.mktemp('store')}"
    store = FilesystemStore(root)
    path = store.get_train_data_path()
    for day in range(DAYS):
        ids = np.arange(day * ROWS, (day + 1) * ROWS)
        table = pa.table({"id": ids, "pair": np.stack([ids, -ids], 1).tolist()})
        with store.open_atomic(f"{path}/_day={day}%2E5/part 0#?.parquet") as file:
            parquet.write_table(table, file, row_group_size=7)
    for hidden in ("_SUCCESS", ".part.parquet", "_temporary/0/part.parquet", "part.parquet.crc"):
        store.write_text(f"{path}/{hidden}", "no data")
    yield store
    fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.fixture(scope="module")
def manifest(store):
    return read_manifest(store, store.get_train_data_path(), None, ["id", "pair", "_day"])


@contextlib.contextmanager
def opened(reader, store, manifest, **options):
    plan = plan_shards(manifest.train.row_groups, 2, seed=0)
    parts = []
    for rank in range(2):
        with READERS[reader](
            train_dir=manifest.train.path,
            val_dir=manifest.train.path,
            columns=manifest.columns,
            train_plan=plan,
            val_plan=plan,
            train_batch_size=4,
            val_batch_size=4,
            cur_shard=rank,
            shard_count=2,
            store=store,
            **options,
        ) as module:
            batches = list(itertools.islice(module.train_data(), plan.steps(4)))
            parts += [*batches, *module.val_data()]
    yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_files_keep_their_scheme_and_partitions_are_columns(store, manifest):
    path = store.get_train_data_path()
    assert path.startswith("memory:///")
    assert manifest.train.path == path
    assert [(group.file, group.index, group.rows) for group in manifest.train.row_groups] == [
        (f"{path}/_day={day}%2E5/part 0#?.parquet", index, rows)
        for day in range(DAYS)
        for index, rows in enumerate([7, 7, 6])
    ]
    assert [(c.name, c.kind, c.dtype, c.shape) for c in manifest.columns] == [
        ("id", "scalar", "int64", ()),
        ("pair", "array", "int64", (2,)),
        ("_day", "partition", "float64", ()),
    ]
    assert DatasetManifest.from_json(manifest.to_json()) == manifest

    rows = first_rows(store, manifest, 3)
    assert rows["pair"].tolist() == [[0, 0], [1, -1], [2, -2]]
    assert rows["_day"].tolist() == [0.5] * 3


@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize("reader", READERS)
def test_rows_are_read_once_per_pass_of_training_and_validation(store, manifest, reader, pool):
    """Several threads read at a time; each file is one object in memory."""
    workers = {"train_reader_worker_count": 4, "val_reader_worker_count": 4}
    with opened(reader, store, manifest, reader_pool_type=pool, **workers) as rows:
        ids = rows["id"]
        assert sorted(ids) == sorted([*range(DAYS * ROWS)] * 2)
        assert (rows["pair"] == np.stack([ids, -ids], 1)).all()
        assert (rows["_day"] == ids // ROWS + 0.5).all()


def test_errors_name_non_parquet_files_and_paths_without_files(store):
    other = f"{store.prefix_path}/other"
    with pytest.raises(StoreError, match=f"no Parquet dataset at '{other}'"):
        read_manifest(store, other, None, ["id"])
    store.write_text(f"{other}/_SUCCESS", "")
    with pytest.raises(StoreError, match=f"no Parquet files under '{other}'"):
        read_manifest(store, other, None, ["id"])
    store.write_text(f"{other}/a.parquet", "not Parquet")
    with pytest.raises(StoreError, match=f"cannot read '{other}/a.parquet'"):
        read_manifest(store, other, None, ["id"])
    with store.open_atomic(f"{other}/a.parquet") as file:
        parquet.write_table(pa.table({"id": [1, None]}), file)
    with pytest.raises(DataError, match="holds 1 nulls"):
        read_manifest(store, f"{other}/a.parquet", None, ["id"])
