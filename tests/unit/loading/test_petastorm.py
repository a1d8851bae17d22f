"""Row ranges in Petastorm's worker pools."""

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

from hvd_estimators.loading import interleave
from hvd_estimators.loading.petastorm import _IS_LAST, PetastormDataModule, _tables
from hvd_estimators.loading.plan import plan_shards

pytestmark = pytest.mark.timeout(60)


class Pool:
    """Fake pool with two tables of one row for each item."""

    def __init__(self):
        self.requested = []
        self.left = []

    def ventilate(self, sequence):
        self.requested.append(sequence)
        self.left += [(sequence, part) for part in (0, 1)]

    def get_results(self):
        if not self.left:
            raise EmptyResultError
        sequence, part = self.left.pop(0)
        table = pa.table({"x": [10 * sequence + part]})
        return table.replace_schema_metadata({_IS_LAST: str(part)})


def test_requests_are_bounded():
    pool = Pool()
    items = ({"sequence": number} for number in range(4))

    tables = [(table["x"][0].as_py(), len(pool.requested)) for table in _tables(pool, items, 2)]

    # An item is requested when the last table of an earlier item can be read.
    requests = [(0, 2), (1, 3), (10, 3), (11, 4), (20, 4), (21, 4), (30, 4), (31, 4)]
    assert tables == requests


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


@pytest.mark.parametrize("pool", ["thread", "dummy", "process"])
def test_reading_opens_no_port(tmp_path, pool):
    """Petastorm's own process pool listens, and unpickles what any user of the machine sends."""
    before = sockets()
    with opened(tmp_path / "data", 60, reader_pool_type=pool) as module:
        runs = module.train_chunks()
        rows = [row for _ in range(2) for row in next(runs).rows.columns()["x"]]
        assert sockets() == before
    assert sorted(set(rows)) == list(range(60))


def sockets():
    """Return the network sockets of this process and its descendants."""
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    return {(s.laddr, s.status) for p in processes for s in p.net_connections("inet")}


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
