"""Rows per second of both readers on S3 and HDFS, against local disk, requests, and whole fits.

The servers run on this machine: moto's S3, and a Hadoop NameNode with three DataNodes, as files
have three replicas by default. ``HVD_TEST_JARS`` names the folder of Hadoop's archives; HDFS is
left out without it.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.common import need_baseline
from benchmarks.figures import compared, parser, show_result, show_table
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.footers import FooterCache
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.data.remote_reads import joined
from hvd_estimators.launch import LocalBackend
from hvd_estimators.loading.interleave import one_per_group
from hvd_estimators.loading.petastorm import PetastormDataModule
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule, PlannedDataModule
from hvd_estimators.store import Store
from hvd_estimators.store.base import Store as BaseStore
from hvd_estimators.torch import TorchEstimator

WORKERS = 2
FILES = 4
ROW_GROUP_BYTES = 16 * 2**20
BATCH = 1000
EPOCHS = 2
READERS = (ArrowDataModule, PetastormDataModule)
WANTED = [f"x{i:02}" for i in range(20)] + ["vector"]


@dataclass(frozen=True)
class Place:
    """A copy of the data in one store.

    Attributes
    ----------
    name : str
        Name in tables.
    store : Store
        Store that reads it.
    manifest : DatasetManifest
        Manifest of the data.
    """

    name: str
    store: Store
    manifest: DatasetManifest

    @property
    def rows(self) -> int:
        return self.manifest.train.rows


Contender = Callable[[], tuple[int, float]]
"""Reads rows; returns their number and the seconds."""


def main() -> None:
    options = parser(__doc__, rows=1_000_000, repeats=3).parse_args()
    need_baseline()
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-stores-") as name:
        folder = Path(name)
        write(folder / "data" / "train", options.rows)
        with contextlib.ExitStack() as stack:
            found = list(places(stack, folder))
            requests = {place.name: count_requests(place) for place in found}
            speeds = measure(stack, found, options.repeats)
            seconds = fit(found, options.repeats)
    table = []
    figures: dict[str, Any] = {}
    for place in found:
        for what in speeds:
            speed, local = max(speeds[what][place.name]), max(speeds[what]["local"])
            epoch = requests[place.name].get(what, {})
            row = (place.name, what, speed, speed / local)
            table.append((*row, epoch.get("first", "-"), epoch.get("next", "-")))
            figures[f"{place.name}, {what}"] = {
                "rows_per_second": speed,
                "of_local": speed / local,
                "requests": epoch,
            }
    groups = len(found[0].manifest.train.row_groups)
    show_table(
        f"{options.rows} rows, {FILES} files, {groups} row groups",
        ("store", "reader", "rows/s", "of local disk", "requests, first epoch", "later epochs"),
        table,
    )
    best = {name: min(each) for name, each in seconds.items()}
    show_table(
        f"fit_on_parquet: 2 processes, {EPOCHS} epochs",
        ("store", "s", "of local disk"),
        [(name, found, best["local"] / found) for name, found in best.items()],
    )
    settings = {"rows": options.rows, "files": FILES, "row_groups": groups, "workers": WORKERS}
    records = compared(f"fit, {EPOCHS} epochs", seconds, "s", "local") + [
        record
        for what, each in speeds.items()
        for record in compared(what, each, "rows/s", "local")
    ]
    for which, title in (("first", "a first epoch"), ("next", "later epochs")):
        counts = {
            f"{place}, {what}": [epoch[which]]
            for place, of in requests.items()
            for what, epoch in of.items()
        }
        records += compared(f"requests of {title}", counts, "requests")
    show_result("stores", settings, {"stores": figures}, records)


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
        values = rng.standard_normal((count, 16), np.float32)
        offsets = np.arange(0, values.size + 1, 16, dtype=np.int32)
        columns["vector"] = pa.ListArray.from_arrays(offsets, values.reshape(-1))
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


def fit(found: list[Place], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of fits on each store, in turns, with processes that are warm."""
    seconds: dict[str, list[float]] = {place.name: [] for place in found}
    backend = LocalBackend(2)
    for turn in range(repeats + 1):
        for place in found:
            net = torch.nn.Sequential(
                torch.nn.Linear(16, 64),
                torch.nn.ReLU(),
                torch.nn.Linear(64, 1),
                torch.nn.Flatten(0),
            )
            estimator = TorchEstimator(
                model=net,
                optimizer=torch.optim.SGD(net.parameters(), 0.01),
                loss=torch.nn.functional.mse_loss,
                feature_cols=["vector"],
                label_cols=["x00"],
                **{"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0},
                **{"backend": backend, "store": place.store},
            )
            started = time.perf_counter()
            estimator.fit_on_parquet()
            if turn:
                seconds[place.name].append(time.perf_counter() - started)
    return seconds


def module(kind: type[PlannedDataModule], place: Place) -> PlannedDataModule:
    return kind(
        train_dir=place.manifest.train.path,
        val_dir=None,
        columns=place.manifest.columns,
        train_plan=plan_shards(place.manifest.train.row_groups, 1),
        train_batch_size=BATCH,
        train_reader_worker_count=WORKERS,
        store=place.store,
    )


def count_requests(place: Place) -> dict[str, dict[str, int]]:
    """Return the requests of a first and of a later epoch for each reader."""
    found: dict[str, dict[str, int]] = {}
    for kind in READERS:
        with module(kind, place) as data, counted() as requests:
            bundles = one_per_group(data.train_plan.shards[0])
            counts = []
            for _ in range(2):
                before = len(requests)
                rows = sum(
                    len(next(iter(part.values()))) for part in data.read(iter([bundles]), WORKERS)
                )
                assert rows == place.rows
                counts.append(len(requests) - before)
        found[kind.short_name] = {"first": counts[0], "next": counts[1]}
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Record the bytes of each range that this process requests from a store."""
    sizes: list[int] = []
    read_ranges = BaseStore.read_ranges

    def read_and_note(store: Store, path: str, ranges: Any) -> list[bytes]:
        found = read_ranges(store, path, ranges)
        sizes.extend(map(len, found))
        return found

    BaseStore.read_ranges = read_and_note  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        BaseStore.read_ranges = read_ranges  # type: ignore[method-assign]


def measure(
    stack: contextlib.ExitStack, found: list[Place], repeats: int
) -> dict[str, dict[str, float]]:
    """Return the rows per second of each contender on each store, in turns."""
    contenders: dict[tuple[str, str], Contender] = {}
    for place in found:
        for kind in READERS:
            contenders[kind.short_name, place.name] = reading(stack, kind, place)
        contenders["fetching alone", place.name] = fetching(place)
    speeds: dict[str, dict[str, list[float]]] = {}
    for turn in range(repeats + 1):
        for (what, name), contender in contenders.items():
            rows, seconds = contender()
            if turn:
                speeds.setdefault(what, {}).setdefault(name, []).append(rows / seconds)
    return speeds


def reading(stack: contextlib.ExitStack, kind: type[PlannedDataModule], place: Place) -> Contender:
    """Open a reader of shuffled rows, pass after pass; a warm-up pass precedes a timed one."""
    data = stack.enter_context(module(kind, place))
    batches = data.train_chunks()

    def take() -> int:
        rows = 0
        while rows < place.rows:
            rows += sum(next(batches).sizes)
        return rows

    def run() -> tuple[int, float]:
        take()
        started = time.perf_counter()
        rows = take()
        return rows, time.perf_counter() - started

    return run


def fetching(place: Place) -> Contender:
    """Fetch the same bytes, in the same requests, file after file, without decoding."""
    store, footers = place.store, FooterCache(place.store)

    def run() -> tuple[int, float]:
        started = time.perf_counter()
        for file in dict.fromkeys(group.file for group in place.manifest.train.row_groups):
            footer = footers.get(file)
            groups = range(footer.metadata.num_row_groups)
            store.read_ranges(
                file, [run for i in groups for run in joined(footer.chunks(i, WANTED))]
            )
        return place.rows, time.perf_counter() - started

    return run


if __name__ == "__main__":
    main()
