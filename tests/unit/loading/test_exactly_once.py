"""Every row is read once per epoch, for any layout of files."""

import contextlib
import itertools

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.loading import interleave, shuffle
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

LAYOUTS = 40


def write_layout(folder, rng, ranks):
    """Write numbered rows into files and row groups of random sizes, some files without rows."""
    rows = int(rng.integers(ranks, 300))
    cuts = np.sort(rng.integers(0, rows + 1, rng.integers(0, 6)))
    for number, ids in enumerate(np.split(np.arange(rows), cuts)):
        table = pa.table({"id": ids, "a": ids * 0.5, "b": ids * 0.25})
        size = int(rng.integers(1, rows + 1))
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=size)
    return rows


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("reader", READERS)
def test_every_row_of_random_layouts_is_read_once(tmp_path, monkeypatch, reader, ranks):
    """Two hundred layouts per reader; in most, the small buffers overflow."""
    rng = np.random.default_rng(ranks)
    for layout in range(LAYOUTS):
        folder = tmp_path / str(layout)
        folder.mkdir()
        rows = write_layout(folder, rng, ranks)
        monkeypatch.setattr(shuffle, "SHUFFLE_BUFFER_BYTES", int(rng.integers(24, 8000)))
        monkeypatch.setattr(shuffle, "CHUNK_BYTES", int(rng.integers(24, 2000)))
        monkeypatch.setattr(interleave, "PART_BYTES", int(rng.integers(24, 4000)))
        manifest = read_manifest(LocalStore(str(folder)), str(folder), None, ["id", "a", "b"])
        plan = plan_shards(manifest.train.row_groups, ranks)
        batch_size = int(rng.integers(1, 70))
        options = {
            "train_dir": str(folder),
            "val_dir": None,
            "columns": manifest.columns,
            "train_plan": plan,
            "train_batch_size": batch_size,
            "shuffle": bool(rng.integers(4)),
            "reader_pool_type": str(rng.choice(["dummy", "thread"])),
            "random_seed": layout,
        }
        delivered = []
        for rank in range(ranks):
            with READERS[reader](cur_shard=rank, shard_count=ranks, **options) as data:
                for batch in itertools.islice(data.train_data(), plan.steps(batch_size)):
                    delivered += batch["id"].tolist()
                    np.testing.assert_array_equal(batch["a"], batch["id"] * 0.5)
                    np.testing.assert_array_equal(batch["b"], batch["id"] * 0.25)

        assert sorted(delivered) == list(range(rows)), options
