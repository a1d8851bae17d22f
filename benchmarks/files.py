"""Seconds of planning and of a rank's start over the number of small files, and requests per file.

The driver reads the footers and plans two shards. A rank then reads its shard until it has the
first batch of shuffled rows. PyArrow alone, reading the footers one after another or counting the
rows of a dataset, and a single file with the same rows are the baselines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import dataset, parquet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.s3 import S3

from benchmarks.figures import Record, compared, seconds, show_result, show_table
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.loading.plan import ShardPlan, plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.store import Store

RANKS = 2
ROWS = 100
"""Rows per file."""

BATCH = 32
COLUMNS = ["features", "label", "x0", "x1"]
PLANNING, FIRST_BATCH = "planning", "first batch of a rank"
ONE_PLANNING, ONE_FIRST_BATCH = "planning, one file", "first batch of a rank, one file"
FOOTERS, COUNT = "PyArrow's footers in a loop", "pyarrow.dataset's count_rows"


def rows_of(files: int) -> bytes:
    """Return a Parquet file with the rows of some files."""
    rng = np.random.default_rng(0)
    rows = files * ROWS
    values = rng.standard_normal((rows, 8), np.float32)
    offsets = np.arange(0, values.size + 1, 8, dtype=np.int32)
    columns: dict[str, Any] = {
        "features": pa.ListArray.from_arrays(offsets, values.reshape(-1)),
        "label": rng.standard_normal(rows, np.float32),
        **{f"x{i}": rng.standard_normal(rows) for i in range(4)},
    }
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def plan(store: Store, path: str) -> tuple[DatasetManifest, ShardPlan]:
    """Plan as the driver does."""
    manifest = read_manifest(store, path, None, COLUMNS)
    groups = manifest.train.row_groups
    return manifest, plan_shards(groups, RANKS, seed=1, open_bytes=SHUFFLE_BUFFER_BYTES)


def take_first_batch(store: Store, manifest: DatasetManifest, shards: ShardPlan) -> None:
    """Read as a rank does that trains one epoch."""
    with ArrowDataModule(
        train_dir=manifest.train.path,
        val_dir=None,
        columns=manifest.columns,
        train_plan=shards,
        train_batch_size=BATCH,
        cur_shard=0,
        shard_count=RANKS,
        total_train_steps=shards.steps(BATCH),
        store=store,
    ) as data:
        assert len(next(data.train_data())["label"]) == BATCH


def footers_in_a_loop(folder: Path) -> None:
    """Read the footers of all files with PyArrow alone."""
    assert all(parquet.read_metadata(file).num_rows == ROWS for file in sorted(folder.iterdir()))


def measure_local(folder: Path, files: int, repeats: int) -> dict[str, list[float]]:
    """Measure planning and starting, in turn with the baselines."""
    many, one = folder / "many", folder / "one"
    content = rows_of(1)
    for path in (many, one):
        path.mkdir(parents=True)
    for number in range(files):
        (many / f"part-{number:06}.parquet").write_bytes(content)
    (one / "part.parquet").write_bytes(rows_of(files))
    store = Store.create(str(folder))
    ways: dict[str, Callable[[], Any]] = {
        FOOTERS: lambda: footers_in_a_loop(many),
        COUNT: lambda: dataset.dataset(str(many)).count_rows(),
        PLANNING: lambda: plan(store, str(many)),
        ONE_PLANNING: lambda: plan(store, str(one)),
    }
    of_many, of_one = plan(store, str(many)), plan(store, str(one))
    ways[FIRST_BATCH] = lambda: take_first_batch(store, *of_many)
    ways[ONE_FIRST_BATCH] = lambda: take_first_batch(store, *of_one)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken[name].append(seconds(way))
    return taken


def measure_s3(s3: S3, files: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Measure on S3, and count the requests per file."""
    store = Store.create(f"{s3.new_bucket()}/data", storage_options=s3.storage_options)
    content = rows_of(1)
    for number in range(files):
        with store.open_atomic(f"{store.prefix_path}/many/part-{number:06}.parquet") as file:
            file.write(content)
    path = f"{store.prefix_path}/many"
    planned = plan(store, path)
    taken: dict[str, list[float]] = {PLANNING: [], FIRST_BATCH: []}
    requests: dict[str, float] = {}
    for _ in range(repeats):
        before = len(s3.requests())
        taken[PLANNING].append(seconds(lambda: plan(store, path)))
        between = len(s3.requests())
        taken[FIRST_BATCH].append(seconds(lambda: take_first_batch(store, *planned)))
        requests[PLANNING] = (between - before) / files
        # Each rank reads half of the files.
        requests[FIRST_BATCH] = (len(s3.requests()) - between) * RANKS / files
    return taken, requests


@contextlib.contextmanager
def running_s3(folder: Path) -> Iterator[S3]:
    """Run moto's S3."""
    s3 = S3(folder)
    s3.start_process()
    try:
        yield s3
    finally:
        s3.end_process()


def counts_up_to(most: int) -> list[int]:
    """Return 1, 10, 100 and so on."""
    return [10**power for power in range(len(str(most))) if 10**power <= most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="ignored: each file has a few rows")
    parser.add_argument("--files", type=int, default=100_000, help="largest number on local disk")
    parser.add_argument("--s3-files", type=int, default=1000, help="largest number on S3")
    parser.add_argument("--repeats", type=int, default=3, help="times, in turn; the best counts")
    options = parser.parse_args()
    figures: dict[str, Any] = {"local": {}, "S3": {}}
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as name:
        folder = Path(name)
        # The first read also imports modules.
        measure_local(folder / "warm-up", RANKS, 1)
        for files in counts_up_to(options.files):
            repeats = options.repeats if files <= 10_000 else 1
            taken = measure_local(folder / str(files), files, repeats)
            figures["local"][files] = taken
            records += report(f"local disk, {files} files", taken, files)
        with running_s3(folder) as s3:
            measure_s3(s3, RANKS, 1)
            for files in counts_up_to(options.s3_files):
                if files < RANKS:
                    continue
                taken, requests = measure_s3(s3, files, options.repeats)
                figures["S3"][files] = {"seconds": taken, "requests_per_file": requests}
                records += report(f"S3, {files} files", taken, files)
                counted = {what: [number] for what, number in requests.items()}
                records += compared(f"requests per file, S3, {files} files", counted, "requests")
                print(
                    ", ".join(f"{what}: {n:.3g} requests per file" for what, n in requests.items())
                )
    show_result("files", vars(options), figures, records)


def report(title: str, taken: dict[str, list[float]], files: int) -> list[Record]:
    """Show the seconds of a number of files, and return their records."""
    found = compared(title, taken, "s", FOOTERS if FOOTERS in taken else None, at=files)
    show_table(
        title,
        ["", "seconds", "ms per file"],
        [[record.name, record.value, record.value / files * 1e3] for record in found],
    )
    return found


if __name__ == "__main__":
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    main()
