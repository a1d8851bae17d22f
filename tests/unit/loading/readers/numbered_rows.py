"""Numbered rows in Parquet files, read by a rank through one of the readers."""

import contextlib
import itertools

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore

ROWS = 53
READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

current = []
"""The reader of the current test."""


def current_reader():
    return current[-1]


class Dataset:
    """Numbered rows in several files and row groups, with their manifest."""

    def __init__(self, folder, rows, files, row_group_size, first=0):
        folder.mkdir()
        self.folder = folder
        parts = np.array_split(np.arange(first, first + rows), files)
        for number, ids in enumerate(parts):
            table = pa.table(
                {
                    "id": ids,
                    "pair": pa.array(pairs(ids).tolist(), pa.list_(pa.float32())),
                    "unused": [f"text {i}" for i in ids],
                }
            )
            path = folder / f"part-{number:03}.parquet"
            parquet.write_table(table, path, row_group_size=row_group_size)
        self.read_manifest()

    def read_manifest(self):
        folder = str(self.folder)
        self.manifest = read_manifest(LocalStore(folder), folder, None, ["id", "pair"])

    def plan(self, num_shards, **options):
        return plan_shards(self.manifest.train.row_groups, num_shards, **options)


def pairs(ids):
    return np.stack([ids, -ids], axis=1).astype(np.float32)


def module(dataset, rank=0, size=1, batch_size=4, **options):
    options = {"reader_pool_type": "thread", "random_seed": 7, **options}
    options = {"train_plan": dataset.plan(size), **options}
    return current_reader()(
        train_dir=str(dataset.folder),
        val_dir=None,
        columns=dataset.manifest.columns,
        cur_shard=rank,
        shard_count=size,
        train_batch_size=batch_size,
        **options,
    )


def steps(dataset, size=1, batch_size=4):
    return dataset.plan(size).steps(batch_size)


def take(dataset, count, **options):
    """Return the rows of the first training batches, one list per batch."""
    with module(dataset, **options) as data:
        return [batch["id"].tolist() for batch in itertools.islice(data.train_data(), count)]


def flat(batches):
    return list(itertools.chain(*batches))
