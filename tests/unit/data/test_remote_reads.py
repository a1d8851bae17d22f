"""Remote reads of Parquet: the requests, and the memory held. No Spark."""

from __future__ import annotations

import contextlib
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import counted as counted_reads
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hvd_estimators.data import footers, remote_reads
from hvd_estimators.data.discovery import first_rows, read_manifest
from hvd_estimators.data.footers import FileFooter, FooterCache, read_tail
from hvd_estimators.data.manifest import RowRange
from hvd_estimators.data.remote_reads import FetchedFile, RangeFiles, RangeRead, joined
from hvd_estimators.exceptions import StoreError
from hvd_estimators.loading.interleave import range_tables
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import Store

pytestmark = pytest.mark.timeout(60)

READERS = {"arrow": ArrowDataModule}
with contextlib.suppress(ImportError):  # it cannot be installed with today's PyArrow
    from hvd_estimators.loading.petastorm import PetastormDataModule

    READERS["petastorm"] = PetastormDataModule

FILES, GROUPS, ROWS = 3, 4, 50
"""Number of files, of row groups per file, and of rows per row group."""

SMALL, NEAR = 8, 400
"""Bytes per row between two columns.

With few, the whole file lies in its end, which is fetched for the footer.
"""


def write(path, first=0, rows=GROUPS * ROWS, group_rows=ROWS, between=NEAR, **options):
    """Write numbered rows: two requested columns with an unrequested one between them."""
    ids = np.arange(first, first + rows)
    table = pa.table({"id": ids, "between": [bytes(between)] * rows, "twice": 2 * ids})
    path.parent.mkdir(parents=True, exist_ok=True)
    # Statistics would be between the columns as well.
    options = {
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": ["id", "twice"],
        **options,
    }
    parquet.write_table(table, path, row_group_size=group_rows, **options)


@pytest.fixture
def between():
    """Bytes per row between the requested columns."""
    return NEAR


@pytest.fixture
def counted(tmp_path, between):
    store, requests = counted_reads.make_store(tmp_path)
    for number in range(FILES):
        path = Path(store.local(store.get_train_data_path())) / f"{number}.parquet"
        write(path, number * GROUPS * ROWS, between=between)
    return store, requests


@pytest.fixture
def manifest(counted):
    store, requests = counted
    path = store.get_train_data_path()
    found = read_manifest(store, path, path, ["id", "twice"])
    # The driver also reads each footer once, of both parts of the dataset.
    files = [Path(store.local(path)) for path in store.find(store.prefix_path)]
    ends = [min(file.stat().st_size, footers.TAIL_BYTES) for file in files]
    assert sorted(size for _, _, size in requests.take()) == sorted(2 * ends)
    return found


@pytest.mark.parametrize(
    ("ranges", "hole", "runs"),
    [
        ([], 0, []),
        ([(5, 9)], 0, [(5, 9)]),
        ([(5, 9), (9, 12), (0, 5)], 0, [(0, 12)]),
        ([(0, 5), (6, 9)], 0, [(0, 5), (6, 9)]),
        ([(0, 5), (6, 9)], 1, [(0, 9)]),
        ([(0, 9), (2, 4), (12, 13)], 2, [(0, 9), (12, 13)]),
    ],
)
def test_adjacent_ranges_are_fetched_together(ranges, hole, runs):
    assert joined(ranges, hole) == runs


@pytest.mark.parametrize("between", [SMALL])
@pytest.mark.parametrize(("pool", "cached"), [("thread", True), ("dummy", True), ("dummy", False)])
@pytest.mark.parametrize("reader", READERS)
def test_a_small_file_takes_one_request(counted, manifest, reader, pool, cached, monkeypatch):
    """One for all its row groups; over all epochs and validation if the files fit in the cache."""
    store, requests = counted
    if not cached:
        monkeypatch.setattr(footers, "_UNPARSED_BYTES", 0)
        monkeypatch.setattr(footers, "_PARSED", 1)
    assert first_rows(store, manifest, 2)["twice"].tolist() == [0, 2]
    assert len(requests.take()) == 1
    plan = plan_shards(manifest.train.row_groups, 1)
    epochs, rows = 2, FILES * GROUPS * ROWS
    with READERS[reader](
        train_dir=manifest.train.path,
        val_dir=manifest.train.path,
        columns=manifest.columns,
        train_plan=plan,
        val_plan=plan,
        train_batch_size=rows,
        val_batch_size=rows,
        shuffle=False,
        reader_pool_type=pool,
        train_reader_worker_count=1,
        total_train_steps=epochs,
        store=store,
    ) as module:
        for batch in itertools.islice(module.train_data(), epochs):
            assert batch["id"].tolist() == list(range(rows))
        for batch in module.val_data():
            assert batch["twice"].tolist() == list(range(0, 2 * rows, 2))
    passes = 1 if cached else epochs + 1
    sizes = [Path(store.local(path)).stat().st_size for path in store.find(manifest.train.path)]
    assert sorted(size for _, _, size in requests.take()) == sorted(passes * sizes)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("pool", ["thread", "dummy"])
@pytest.mark.parametrize("reader", READERS)
def test_no_pass_is_read_ahead_after_the_last_step(counted, manifest, reader, pool, shuffle):
    store, requests = counted
    rows, batch, passes = FILES * GROUPS * ROWS, 60, 2
    ids = {}
    # The run ends in the middle of the second pass. Without an end, requests outlast the reader.
    for total in (3 * rows // batch // 2, None):
        with READERS[reader](
            train_dir=manifest.train.path,
            val_dir=None,
            columns=manifest.columns,
            train_plan=plan_shards(manifest.train.row_groups, 1, seed=3 if shuffle else None),
            train_batch_size=batch,
            shuffle=shuffle,
            reader_pool_type=pool,
            total_train_steps=total,
            store=store,
        ) as module:
            batches = module.train_data()
            of_passes = list(itertools.islice(batches, passes * rows // batch))
            if total is not None:
                chunks = [start for _, start, _ in requests.take() if start >= 0]
                assert len(chunks) == passes * FILES * GROUPS
            of_passes += itertools.islice(batches, rows // batch)
        ids[total] = np.concatenate([columns["id"] for columns in of_passes]).tolist()
    limited, unlimited = ids.values()
    assert limited == unlimited
    for first in range(0, len(limited), rows):
        assert sorted(limited[first : first + rows]) == list(range(rows))


def test_a_long_footer_needs_two_requests_shared_by_all_threads(counted, monkeypatch):
    store, requests = counted
    path = store.find(store.get_train_data_path())[0]
    whole = Path(store.local(path)).read_bytes()
    assert whole.endswith(read_tail(store, path))
    assert len(requests.take()) == 1
    monkeypatch.setattr(footers, "TAIL_BYTES", 100)
    cache = FooterCache(store)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(cache.get, [path] * 50))
    length = int.from_bytes(whole[-8:-4], "little") + 8
    assert [request[1:] for request in requests.take()] == [(-100, 100), (-length, length)]
    assert {footer.metadata.num_row_groups for footer in found} == {GROUPS}


def test_footers_that_need_much_memory_are_read_again(counted, monkeypatch):
    store, requests = counted
    paths = store.find(store.get_train_data_path())
    monkeypatch.setattr(footers, "_PARSED", 1)
    cache = FooterCache(store)
    for path in 2 * paths:
        cache.get(path)
    assert len(requests.take()) == FILES
    monkeypatch.setattr(footers, "_UNPARSED_BYTES", 1)
    cache = FooterCache(store)
    for path in 2 * paths:
        cache.get(path)
    assert len(requests.take()) == 2 * FILES


@pytest.mark.parametrize("group_size", [1, 4])
def test_large_row_groups_are_fetched_in_pieces(tmp_path, monkeypatch, group_size):
    """At most the memory limit plus one piece per column is held."""
    store, requests = counted_reads.make_store(tmp_path)
    rows = 40_000
    write(Path(store.local(f"{store.prefix_path}/a.parquet")), 0, rows, rows, data_page_size=2000)
    path = f"{store.prefix_path}/a.parquet"
    specs = read_manifest(store, path, None, ["id", "twice"]).columns
    requests.take()
    piece, most = 10_000, 80_000
    monkeypatch.setattr(remote_reads, "FETCHED_BYTES", piece)
    monkeypatch.setattr(remote_reads, "WHOLE_BYTES", most)
    monkeypatch.setattr(remote_reads, "OPEN_BYTES", 2 * most)
    held, files_read = [], []
    fetched, read_ranges = FetchedFile.__init__, type(store).read_ranges

    def note_file(self, *args):
        files_read.append(self)
        fetched(self, *args)

    def read_and_look(store, path, ranges):
        spans = [span for file in files_read for span in file._spans]
        held.append(sum(len(span._pieces) * span.piece for span in spans))
        return read_ranges(store, path, ranges)

    monkeypatch.setattr(FetchedFile, "__init__", note_file)
    monkeypatch.setattr(type(store), "read_ranges", read_and_look)
    with RangeFiles(store, specs) as files:
        read = RangeRead(RowRange(path, 0, 0, rows), group_size=group_size)
        with files.open(read) as file:
            tables = [table for table, _ in range_tables(file, read, specs)]
    ids = pa.concat_tables(tables)["id"].to_numpy()
    assert (ids == np.arange(rows)).all()
    (_, *pieces) = requests.take()
    chunks = FileFooter.of(path, read_tail(store, path)).chunks(0, ["id", "twice"])
    total = sum(stop - start for start, stop in chunks)
    assert sum(size for _, _, size in pieces) == total
    share = min(most, 2 * most // group_size)
    expected = [max(share * (stop - start) // total // 2, piece) for start, stop in chunks]
    assert len(pieces) == sum(
        -(-(stop - start) // size) for (start, stop), size in zip(chunks, expected, strict=True)
    )
    assert max(held) <= share + 2 * sum(expected)


def test_truncated_files_are_reported(counted, manifest):
    store, _ = counted
    part = plan_shards(manifest.train.row_groups, 1).shards[0][-1]
    with RangeFiles(store, manifest.columns) as files:
        files.footers.get(part.file)
        local = Path(store.local(part.file))
        local.write_bytes(local.read_bytes()[:100])
        with (
            pytest.raises(StoreError, match="changed after training had begun"),
            files.open(RangeRead(part)) as file,
        ):
            list(range_tables(file, RangeRead(part), manifest.columns))


@pytest.mark.parametrize("between", [SMALL, NEAR])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_a_replaced_file_of_the_same_length_is_reported(tmp_path, reader, remote, between):
    """Also if the driver and the ranks read it within the resolution of its modification time."""
    store = counted_reads.make_store(tmp_path)[0] if remote else Store.create(str(tmp_path))
    path = f"{store.prefix_path}/data/a.parquet"
    local = Path(store.local(path) if remote else path)
    write(local, first=0, between=between)
    size = local.stat().st_size
    manifest = read_manifest(store, f"{store.prefix_path}/data", None, ["id", "twice"])
    options = {
        "train_dir": manifest.train.path,
        "val_dir": None,
        "columns": manifest.columns,
        "train_plan": plan_shards(manifest.train.row_groups, 1),
        "store": store,
    }
    write(local, first=0, between=between)  # the same content
    with READERS[reader](**options) as module:
        assert len(next(module.train_data())["id"])
    write(local, first=1, between=between)
    assert local.stat().st_size == size
    with (
        READERS[reader](**options) as module,
        pytest.raises(
            StoreError, match=r"a\.parquet' was replaced after training had been planned"
        ),
    ):
        next(module.train_data())


@pytest.mark.parametrize("remote", [False, True])
def test_files_that_only_the_driver_sees_are_reported(tmp_path, remote):
    store = counted_reads.make_store(tmp_path)[0] if remote else Store.create(str(tmp_path))
    path = f"{store.prefix_path}/data/a.parquet"
    local = Path(store.local(path) if remote else path)
    write(local)
    manifest = read_manifest(store, f"{store.prefix_path}/data", None, ["id"])
    local.unlink()
    (part, *_) = plan_shards(manifest.train.row_groups, 1).shards[0]
    told = rf"no file .*a\.parquet' on the machine {socket.gethostname()}.*driver and all executors"
    with (
        RangeFiles(store, manifest.columns) as files,
        pytest.raises(StoreError, match=told),
        files.open(RangeRead(part)),
    ):
        pass


def test_the_size_is_requested_without_suffix_requests(counted, manifest, monkeypatch):
    store, requests = counted
    path = manifest.train.row_groups[0].file
    expected = store.read_ranges(path, [(-10, None), (4, 6), (-(10**9), None)])
    monkeypatch.setattr(type(store), "_takes_suffixes", lambda self: False)
    assert store.read_ranges(path, [(-10, None), (4, 6), (-(10**9), None)]) == expected
    whole = Path(store.local(path)).read_bytes()
    assert expected == [whole[-10:], whole[4:6], whole]
    requests.take()


def test_dry_runs_read_only_some_pages(counted, manifest):
    store, requests = counted
    assert first_rows(store, manifest, 2)["twice"].tolist() == [0, 2]
    assert all(size <= 2**16 for _, _, size in requests.take())


def test_the_footer_of_a_local_file_is_read_once(tmp_path, monkeypatch):
    write(tmp_path / "data" / "a.parquet")
    store = Store.create(str(tmp_path))
    manifest = read_manifest(store, str(tmp_path / "data"), None, ["id"])
    paths = []

    def read_and_note(store, path):
        paths.append(path)
        return read_tail(store, path)

    monkeypatch.setattr(footers, "read_tail", read_and_note)
    with RangeFiles(store, manifest.columns) as files:
        for part in plan_shards(manifest.train.row_groups, 1).shards[0]:
            with files.open(RangeRead(part)) as file:
                tables = [t for t, _ in range_tables(file, RangeRead(part), manifest.columns)]
            assert pa.concat_tables(tables).num_rows == ROWS
    assert len(paths) == 1
