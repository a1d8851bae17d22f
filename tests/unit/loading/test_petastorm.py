"""Row ranges in Petastorm's worker pools."""

import collections
import contextlib
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from foreign import describe, write

pytest.importorskip(
    "petastorm", reason="not installable beside today's PyArrow", exc_type=ImportError
)

from petastorm.workers_pool import EmptyResultError

from hvd_estimators.exceptions import ReaderError
from hvd_estimators.loading import interleave
from hvd_estimators.loading.petastorm import _NEXT, _PART, PetastormDataModule, _in_sequence
from hvd_estimators.loading.plan import plan_shards

pytestmark = pytest.mark.timeout(60)


class Pool:
    """Fake pool that answers requests in a given order, with tables of one row."""

    def __init__(self, order):
        self.order = list(order)
        self.requested = []

    def ventilate(self, sequence):
        self.requested.append(sequence)

    def get_results(self):
        if not self.order:
            raise EmptyResultError
        sequence, part, following = self.order.pop(0)
        assert sequence in self.requested
        numbers = {_PART: f"{sequence} {part}", _NEXT: f"{following[0]} {following[1]}"}
        table = pa.table({"x": [10 * sequence + part]})
        return table.replace_schema_metadata(numbers)


def test_tables_are_reordered_and_requests_are_bounded():
    first_arrivals = [(1, 0, (2, 0)), (0, 1, (1, 0)), (0, 0, (0, 1))]
    pool = Pool([*first_arrivals, (2, 0, (3, 0)), (3, 0, (3, 1)), (3, 1, (4, 0))])
    items = ({"sequence": number} for number in range(4))

    tables = [
        (table["x"][0].as_py(), len(pool.requested)) for table in _in_sequence(pool, items, 2)
    ]

    # A range is requested when the last table of an earlier range can be read.
    assert tables == [(0, 2), (1, 3), (10, 4), (20, 4), (30, 4), (31, 4)]
    assert pool.requested == [0, 1, 2, 3]


def opened(folder, rows, **options):
    """Write numbered rows into one file, and open it for one rank, in batches of 20."""
    write(folder / "a.parquet", x=np.arange(rows))
    manifest = describe(folder, "x")
    return PetastormDataModule(
        train_dir=manifest.train.path,
        val_dir=None,
        columns=manifest.columns,
        train_plan=plan_shards(manifest.train.row_groups, 1),
        train_batch_size=20,
        **options,
    )


@pytest.mark.parametrize("pool", ["thread", "process"])
@pytest.mark.parametrize("limit", [2**30, 1])
def test_a_disk_cache_reads_each_file_once_and_is_deleted(tmp_path, monkeypatch, pool, limit):
    """With a limit of 1 byte nothing fits, and rows must be read again."""
    rows, cache = 60, tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(interleave, "PART_BYTES", 80)
    with opened(
        tmp_path / "data",
        rows,
        reader_pool_type=pool,
        cache_type="local-disk",
        cache_location=str(cache),
        cache_size_limit=limit,
    ) as module:
        runs = module.train_chunks()
        first = [row for run in itertools.islice(runs, 1) for row in run.rows.columns()["x"]]
        if limit > 1:
            # From now on only the cache has the rows.
            (tmp_path / "data" / "a.parquet").unlink()
        passes = [[row for row in next(runs).rows.columns()["x"]] for _ in range(5)]
        assert list(cache.iterdir()) != []

    for found in [first, *passes]:
        assert sorted(found) == list(range(rows))
    assert list(cache.iterdir()) == []


def petastorm_workers():
    """Return the processes of pools; processes of other tests may end meanwhile."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "petastorm" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_process_is_an_error(tmp_path, workers):
    with opened(
        tmp_path / "data",
        60,
        reader_pool_type="process",
        train_reader_worker_count=workers,
    ) as module:
        runs = module.train_chunks()
        next(runs)
        pool = petastorm_workers()
        assert len(pool) == workers
        pool[0].kill()
        with pytest.raises(ReaderError, match=rf"worker processes .* {pool[0].pid} \(SIGKILL\)"):
            collections.deque(runs, maxlen=0)
    assert not any(child.is_running() for child in pool)


@pytest.mark.parametrize("part_bytes", [80, 2**24], ids=["no room", "no work"])
def test_waiting_threads_sleep(tmp_path, monkeypatch, part_bytes):
    """Polling would take the interpreter's lock from training a thousand times a second."""
    monkeypatch.setattr(interleave, "PART_BYTES", part_bytes)
    others = set(threading.enumerate())

    with opened(tmp_path / "data", 1000) as module:
        runs = module.train_chunks()
        next(runs)
        own = [thread.native_id for thread in threading.enumerate() if thread not in others]
        for _ in range(50):
            before = wake_ups(own)
            time.sleep(0.1)
            after = wake_ups(own)
            # Petastorm's consumer polls every 0.1 s for more tables.
            if after - before < 10:
                break
        else:
            pytest.fail(f"{len(own)} threads woke up {after - before} times in 0.1 s")


def wake_ups(threads):
    """Count how often threads have slept so far."""
    total = 0
    for thread in threads:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
        counts = [line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")]
        total += int(counts[0])
    return total
