"""Whole fits and rows per second of the reader on S3 and HDFS, against local disk.

The servers run on this machine: moto's S3, and a Hadoop NameNode with three DataNodes, as files
have three replicas by default. Fetching alone requests the same bytes without decoding them.
``HVD_TEST_JARS`` names the folder of Hadoop's archives; HDFS is
left out without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from servers.hdfs import Hdfs
from servers.jars import jars
from servers.s3 import S3

from benchmarks.common import lists
from benchmarks.figures import compared, in_turns, options, rows_per_second, show_result
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.footers import FooterCache
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.data.remote_reads import joined
from hvd_estimators.launch import LocalBackend
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import Store
from hvd_estimators.torch import TorchEstimator

WORKERS = 2
FILES = 4
ROW_GROUP_BYTES = 16 * 2**20
BATCH = 1000
EPOCHS = 2
WANTED = [f"x{i:02}" for i in range(20)] + ["vector"]


@dataclass(frozen=True)
class Place:
    """A copy of the data in one store, and its name in tables."""

    name: str
    store: Store
    manifest: DatasetManifest

    @property
    def rows(self) -> int:
        return self.manifest.train.rows


def main() -> None:
    given = options(__doc__, rows=1_000_000, repeats=3)
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-stores-") as name:
        folder = Path(name)
        write(folder / "data" / "train", given.rows)
        with contextlib.ExitStack() as stack:
            found = list(places(stack, folder))
            readers = {place.name: reading(stack, place) for place in found}
            fetchers = {p.name: rows_per_second(p.rows, fetching(p)) for p in found}
            backend = LocalBackend(2)
            fits = {place.name: functools.partial(fit, place, backend) for place in found}
            records = [
                *compared("arrow", in_turns(readers, given.repeats, 1), "rows/s", "local"),
                *compared("fetching alone", in_turns(fetchers, given.repeats), "rows/s", "local"),
                *compared(f"fit, {EPOCHS} epochs", in_turns(fits, given.repeats, 1), "s", "local"),
            ]
    show_result("stores", {"rows": given.rows, "files": FILES, "workers": WORKERS}, records)


def write(folder: Path, rows: int) -> None:
    """Write files of 20 narrow columns, an unused column, and a vector."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(FILES):
        count = rows // FILES
        columns: dict[str, Any] = {
            f"x{i:02}": rng.standard_normal(count, np.float32) for i in range(20)
        }
        columns["unwanted"] = rng.standard_normal(count)
        columns["vector"] = lists(rng.standard_normal((count, 16), np.float32))
        table = pa.table(columns)
        group = max(ROW_GROUP_BYTES * count // table.nbytes, 1)
        parquet.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)


def places(stack: contextlib.ExitStack, folder: Path) -> Iterator[Place]:
    """Start the servers, and copy the data to them."""
    source = folder / "data" / "train"
    yield _place("local", Store.create(str(folder / "data")), str(source))
    s3 = S3(folder)
    s3.start_process()
    stack.callback(s3.end_process)
    yield _copied("S3", Store.create(s3.url, storage_options=s3.storage_options), source)
    if "HVD_TEST_JARS" in os.environ:
        hdfs = Hdfs(folder / "hdfs", jars("hadoop"), datanodes=3)
        hdfs.start()
        stack.callback(hdfs.stop)
        yield _copied("HDFS", Store.create(hdfs.url), source)


def _copied(name: str, store: Store, source: Path) -> Place:
    target = f"{store.prefix_path}/train"
    for file in sorted(source.iterdir()):
        with store.open_atomic(f"{target}/{file.name}") as copied:
            copied.write(file.read_bytes())
    return _place(name, store, target)


def _place(name: str, store: Store, path: str) -> Place:
    store = Store.create(
        store.prefix_path, train_path=path, storage_options=store.storage_options or None
    )
    return Place(name, store, read_manifest(store, path, None, WANTED))


def fit(place: Place, backend: LocalBackend) -> None:
    """Train on the rows of a store, with processes that are warm after the first fit."""
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1), torch.nn.Flatten(0)
    )
    TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), 0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["vector"],
        label_cols=["x00"],
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        backend=backend,
        store=place.store,
    ).fit_on_parquet()


def reading(stack: contextlib.ExitStack, place: Place) -> Callable[[], float]:
    """Open a reader of shuffled rows, pass after pass; a warm-up pass precedes a timed one."""
    data = stack.enter_context(
        ArrowDataModule(
            train_dir=place.manifest.train.path,
            val_dir=None,
            columns=place.manifest.columns,
            train_plan=plan_shards(place.manifest.train.row_groups, 1),
            train_batch_size=BATCH,
            train_reader_worker_count=WORKERS,
            store=place.store,
        )
    )
    batches = data.train_chunks()

    def take() -> int:
        rows = 0
        while rows < place.rows:
            rows += sum(next(batches).sizes)
        return rows

    def run() -> float:
        take()
        started = time.perf_counter()
        return take() / (time.perf_counter() - started)

    return run


def fetching(place: Place) -> Callable[[], int]:
    """Return a function that fetches the bytes file after file, in the requests of the reader."""
    footers = FooterCache(place.store)

    def fetch() -> int:
        for file in dict.fromkeys(group.file for group in place.manifest.train.row_groups):
            footer = footers.get(file)
            groups = range(footer.metadata.num_row_groups)
            runs = [run for i in groups for run in joined(footer.chunks(i, WANTED))]
            place.store.read_ranges(file, runs)
        return place.rows

    return fetch


if __name__ == "__main__":
    main()
