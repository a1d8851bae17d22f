"""Local cache of a remote store's files. No Spark."""

import contextlib
import errno
import logging
import os
import tempfile
import threading
import time
from pathlib import Path

import counted
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.range_cache import RangeCache
from hvd_estimators.loading.interleave import one_per_group
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

ROWS, GROUPS = 30_000, 3
"""Rows per row group, and row groups. The file is larger than the request for its footer."""


@pytest.fixture
def store(tmp_path):
    store, requests = counted.make_store(tmp_path / "store")
    store.requests = requests
    return store


def write(store, first=0):
    path = Path(store.local(f"{store.prefix_path}/data/a.parquet"))
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": np.arange(first, first + GROUPS * ROWS)})
    parquet.write_table(
        table,
        path,
        row_group_size=ROWS,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )


def read(store, folder, reader="arrow", size=2**30):
    """Read all rows as a new rank, and return them with the number of ranges from the store."""
    manifest = read_manifest(store, f"{store.prefix_path}/data", None, ["id"])
    plan = plan_shards(manifest.train.row_groups, 1)
    store.requests.take()
    with READERS[reader](
        train_dir=manifest.train.path,
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan,
        store=store,
        local_cache_dir=str(folder),
        local_cache_size=size,
    ) as module:
        parts = list(module.read(iter([one_per_group(plan.shards[0])]), 2))
    ids = np.concatenate([part["id"] for part in parts]).tolist()
    # One request is for the footer, by which the cache knows the file.
    return ids, len(store.requests.take()) - 1


def files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("reader", READERS)
def test_later_ranks_read_each_file_version_from_the_cache(store, tmp_path, reader):
    cache = tmp_path / "cache"
    expected = list(range(GROUPS * ROWS))
    write(store)
    assert read(store, cache, reader) == (expected, GROUPS)
    assert read(store, cache, reader) == (expected, 0)

    write(store, first=7)  # Without statistics, both versions have the same footer.
    assert read(store, cache, reader) == ([i + 7 for i in expected], GROUPS)
    assert oct(files(cache)[0].parent.stat().st_mode)[-3:] == "700"


def test_a_full_cache_keeps_the_files_of_its_fit_and_later_fits_replace_them(store, tmp_path):
    cache = tmp_path / "cache"
    expected = list(range(GROUPS * ROWS))
    limit = int(1.5 * 8 * ROWS)  # one row group
    write(store)
    assert read(store, cache, size=limit) == (expected, GROUPS)
    assert read(store, cache, size=limit) == (expected, GROUPS - 1)
    (kept,) = files(cache)

    os.utime(kept, (time.time() - 4000,) * 2)
    write(store, first=1)
    assert read(store, cache, size=limit)[1] == GROUPS
    (replaced,) = files(cache)
    assert replaced != kept


def test_a_full_cache_is_counted_once(store, tmp_path, monkeypatch):
    counts = []
    count = RangeCache._free_for
    monkeypatch.setattr(RangeCache, "_free_for", lambda *of: counts.append(1) or count(*of))
    write(store)
    read(store, tmp_path / "cache", size=1)
    assert len(counts) == 1


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def empty(file):
    os.truncate(file, 0)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, flip, os.unlink])
def test_damaged_files_are_fetched_again(store, tmp_path, damage):
    cache = tmp_path / "cache"
    write(store)
    expected = read(store, cache)[0]
    damage(files(cache)[1])
    assert read(store, cache) == (expected, 1)
    assert read(store, cache) == (expected, 0)


def full(monkeypatch, folder):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)


def no_folder(monkeypatch, folder):
    folder.write_text("a file")


def of_others(monkeypatch, folder):
    inner = folder / f"hvd_estimators-{os.getuid()}"
    inner.mkdir(parents=True)
    inner.chmod(0o777)


@pytest.mark.parametrize("fault", [full, no_folder, of_others])
def test_a_folder_that_cannot_be_used_is_named_once(store, tmp_path, monkeypatch, caplog, fault):
    cache = tmp_path / "cache"
    write(store)
    fault(monkeypatch, cache)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            caplog.clear()
            assert read(store, cache) == (list(range(GROUPS * ROWS)), GROUPS)
            (record,) = caplog.records
            assert "local_cache_dir" in record.message
    assert files(cache) == []


def test_ranks_that_write_the_same_range_at_once_read_complete_ranges(store, tmp_path):
    write(store)
    path = f"{store.prefix_path}/data/a.parquet"
    data = os.urandom(2**20)
    wrong = []

    def rank():
        for part in range(20):
            cache = RangeCache(str(tmp_path / "cache"), 2**30, store)
            if bytes(cache.get(path, 1, part, part + 2**20, lambda start, stop: data)) != data:
                wrong.append(part)

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(files(tmp_path / "cache")) == 20


def test_files_that_other_users_can_replace_are_not_read(store, tmp_path):
    cache = tmp_path / "cache"
    write(store)
    expected = read(store, cache)[0]
    (folder,) = cache.iterdir()
    folder.chmod(0o777)
    assert read(store, cache) == (expected, GROUPS)
