"""How row ranges are handed to Petastorm's worker pools."""

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

from hvd_estimators.exceptions import ReaderError
from hvd_estimators.loading import interleave
from hvd_estimators.loading.petastorm import (
    _NEXT,
    _PART,
    PetastormDataModule,
    _in_sequence,
    _RangeVentilator,
)
from hvd_estimators.loading.plan import plan_shards

pytestmark = pytest.mark.timeout(60)


class Ventilator(_RangeVentilator):
    """Asks for three row ranges; the pool is the test."""

    def __init__(self, in_flight, on_item):
        items = [{"sequence": index} for index in range(3)]
        super().__init__(lambda **item: on_item(item), iter(items), in_flight)


def test_reading_is_not_over_before_the_last_range_has_been_processed():
    """Pools ask this when they are out of work, and stop if so: a range too early or too late."""
    over = []

    def process_at_once(item):
        over.append(ventilator.completed())
        ventilator.processed_item()
        over.append(ventilator.completed())
        ventilator.make_room()

    ventilator = Ventilator(1, process_at_once)
    ventilator.start()
    ventilator._thread.join(10)

    assert over == [False, False, False, False, False, True]


def test_reading_runs_ahead_by_a_bounded_number_of_ranges():
    items = []
    both = threading.Event()

    def note(item):
        items.append(item["sequence"])
        if len(items) == 2:
            both.set()

    ventilator = Ventilator(2, note)
    ventilator.start()
    assert both.wait(10)
    ventilator._thread.join(0.1)
    assert items == [0, 1]

    # What comes too early waits for the range before it, and takes its room.
    ventilator.processed_item()
    ventilator._thread.join(0.1)
    assert items == [0, 1]

    ventilator.make_room()
    ventilator._thread.join(10)
    assert items == [0, 1, 2]
    assert not ventilator.completed()


def test_tables_that_come_out_of_order_wait_for_those_before_them():
    def table(sequence, part, following):
        numbers = {_PART: f"{sequence} {part}", _NEXT: f"{following[0]} {following[1]}"}
        return pa.table({"x": [10 * sequence + part]}).replace_schema_metadata(numbers)

    def arriving():
        for numbers in ((1, 0, (2, 0)), (0, 1, (1, 0)), (2, 0, (3, 0)), (0, 0, (0, 1))):
            log.append(f"in {numbers[0]}.{numbers[1]}")
            yield table(*numbers)

    log = []
    for found in _in_sequence(arriving(), lambda: log.append("room")):
        log.append(found["x"][0].as_py())

    assert log[:4] == ["in 1.0", "in 0.1", "in 2.0", "in 0.0"]
    assert log[4:] == [0, "room", 1, "room", 10, "room", 20]


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
    """Even where nothing fits into it, and what was read has to be read again."""
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
            # From now on the cache is all there is.
            (tmp_path / "data" / "a.parquet").unlink()
        passes = [[row for row in next(runs).rows.columns()["x"]] for _ in range(5)]
        assert list(cache.iterdir()) != []

    for found in [first, *passes]:
        assert sorted(found) == list(range(rows))
    assert list(cache.iterdir()) == []


def petastorm_workers():
    """Return the processes of pools; what other tests have started may have ended, too."""
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
def test_threads_sleep_while_they_wait(tmp_path, monkeypatch, part_bytes):
    """They would take the interpreter's lock from training a thousand times a second."""
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
            # Petastorm looks every 0.1 s whether there is more to come; its own threads, every ms.
            if after - before < 10:
                break
        else:
            pytest.fail(f"{len(own)} threads woke up {after - before} times in 0.1 s")


def wake_ups(threads):
    """Count how often threads have gone to sleep so far."""
    total = 0
    for thread in threads:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
        counts = [line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")]
        total += int(counts[0])
    return total
