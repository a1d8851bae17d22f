"""Seconds of planning and of a rank's start over the number of small files.

The driver reads the footers and plans two shards. A rank then reads its shard until it has the
first batch of shuffled rows. A single file with the same rows and PyArrow alone are the baselines:
it reads the footers one after another, and the rows of a shard's files in two threads.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.common import lists
from benchmarks.figures import Record, compared, in_turns, options, show_result
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
FOOTERS = "PyArrow's footers in a loop"
READING = "PyArrow's rows of a rank"


def rows_of(files: int) -> pa.Table:
    """Return the rows of some files."""
    rng = np.random.default_rng(0)
    rows = files * ROWS
    columns: dict[str, Any] = {
        "features": lists(rng.standard_normal((rows, 8), np.float32)),
        "label": rng.standard_normal(rows, np.float32),
        **{f"x{i}": rng.standard_normal(rows) for i in range(4)},
    }
    return pa.table(columns)


def plan(store: Store, path: Path) -> tuple[DatasetManifest, ShardPlan]:
    """Plan as the driver does."""
    manifest = read_manifest(store, str(path), None, COLUMNS)
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


def read_rows(files: Sequence[Path]) -> None:
    """Read files with PyArrow alone, each file in one of two threads."""

    def read(file: Path) -> int:
        with parquet.ParquetFile(file) as opened:
            return len(opened.read(COLUMNS, use_threads=False))

    with ThreadPoolExecutor(2) as threads:
        assert sum(threads.map(read, files)) == len(files) * ROWS


def measure(folder: Path, files: int, repeats: int) -> dict[str, list[float]]:
    """Measure planning and starting, in turn with the baselines."""
    many, one = folder / "many", folder / "one"
    for path in (many, one):
        path.mkdir(parents=True)
    parquet.write_table(rows_of(1), many / "part-000000.parquet")
    content = (many / "part-000000.parquet").read_bytes()
    for number in range(1, files):
        (many / f"part-{number:06}.parquet").write_bytes(content)
    parquet.write_table(rows_of(files), one / "part.parquet")
    store = Store.create(str(folder))
    files_of_rank = sorted(many.iterdir())[::RANKS]
    ways: dict[str, Callable[[], Any]] = {
        FOOTERS: lambda: [parquet.read_metadata(file) for file in sorted(many.iterdir())],
        READING: lambda: read_rows(files_of_rank),
    }
    for path, suffix in ((many, ""), (one, ", one file")):
        planned = plan(store, path)
        ways[f"planning{suffix}"] = functools.partial(plan, store, path)
        ways[f"first batch of a rank{suffix}"] = functools.partial(
            take_first_batch, store, *planned
        )
    return in_turns(ways, repeats)


def main() -> None:
    given = options(__doc__, repeats=3, files=(1, 100, 10_000))
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as name:
        # The first read also imports modules.
        measure(Path(name, "warm-up"), RANKS, 1)
        for files in given.files:
            taken = measure(Path(name, str(files)), files, given.repeats)
            records += compared(f"local disk, {files} files", taken, "s", FOOTERS, at=files)
    show_result("files", vars(given), records)


if __name__ == "__main__":
    main()
