"""Rows per second of the input pipeline, as tensors, against Petastorm's and plain decoding.

Runs in one process. All contenders run in turns, and the best of each counts, without the first
turn. A loop by hand also shuffles and batches, with torch alone: it shows how much of the rate of
decoding this machine leaves for that.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import lists, need_baseline
from benchmarks.figures import Record, compared, in_turns, options, rows_per_second, show_result
from benchmarks.loader_images import LOADER, of_jpegs
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.loading.petastorm import PetastormDataModule
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule, PlannedDataModule
from hvd_estimators.store import LocalStore
from hvd_estimators.torch.tensors import tensor_batches

WORKERS = 2
IMAGE = 224 * 224 * 3
ROW_GROUP_BYTES = 16 * 2**20
DECODING = "PyArrow decoding"
BY_HAND = "by hand, shuffled and batched"


def main() -> None:
    given = options(__doc__, rows=2_000_000, jpegs=4000, repeats=5)
    need_baseline()
    torch.set_num_threads(1)
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-loader-") as name:
        folder = Path(name)
        for data, batch_sizes in write(folder, given.rows):
            for size in batch_sizes:
                taken = measure(data, size, given.repeats)
                table = f"{Path(data.train.path).name}, batch {size}"
                records += compared(table, taken, "rows/s", DECODING)
        jpegs = of_jpegs(folder / "jpegs", given.jpegs, given.repeats)
        records += compared("images, batch 32", jpegs, "rows/s", LOADER)
    show_result("loader", {"rows": given.rows, "workers": WORKERS}, records)


def write(folder: Path, rows: int) -> Iterator[tuple[DatasetManifest, tuple[int, ...]]]:
    """Write the datasets, one at a time: narrow columns, a vector, images; with batch sizes."""
    rng = np.random.default_rng(0)
    narrow = {f"x{i:02}": rng.standard_normal(rows, np.float32) for i in range(20)}
    yield _write(folder / "narrow", pa.table(narrow)), (1000, 256)
    vector = lists(rng.standard_normal((rows // 4, 64), np.float32))
    yield _write(folder / "vector", pa.table({"vector": vector})), (1000, 256)
    image = lists(rng.integers(0, 256, (max(rows // 1000, 64), IMAGE), np.uint8))
    yield _write(folder / "image", pa.table({"image": image})), (32,)


def _write(folder: Path, table: pa.Table) -> DatasetManifest:
    folder.mkdir()
    group = max(ROW_GROUP_BYTES * len(table) // table.nbytes, 1)
    parquet.write_table(table, folder / "part-0.parquet", row_group_size=group)
    return read_manifest(LocalStore(str(folder)), str(folder), None, table.column_names)


def measure(data: DatasetManifest, batch_size: int, repeats: int) -> dict[str, list[float]]:
    """Return the rows per second of all contenders."""
    rows = data.train.rows
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {
            DECODING: rows_per_second(rows, lambda: decode(data)),
            BY_HAND: rows_per_second(rows, lambda: by_hand(data, batch_size)),
            "BatchedDataLoader": rows_per_second(rows, lambda: petastorm(data, batch_size)),
        }
        for kind in (PetastormDataModule, ArrowDataModule):
            contenders[f"ours, {kind.short_name}"] = ours(stack, kind, data, batch_size)
        return in_turns(contenders, repeats, warm_up=1)


def decode(data: DatasetManifest) -> int:
    """Decode every row group with all of PyArrow's threads, in stored order."""
    return sum(len(next(iter(tensors.values()))) for tensors in decoded(data))


def decoded(data: DatasetManifest) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each row group."""
    with parquet.ParquetFile(data.train.row_groups[0].file) as file:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index)
            tensors = {}
            for spec in data.columns:
                column = table.column(spec.name).combine_chunks()
                column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
                values = column.flatten() if spec.shape else column
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    tensor = torch.from_numpy(values.to_numpy())
                tensors[spec.name] = tensor.reshape(-1, *spec.shape)
            yield tensors


def by_hand(data: DatasetManifest, batch_size: int) -> int:
    """Shuffle each row group and split it into batches, while a thread decodes the next one."""
    rows, parts = 0, decoded(data)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, parts, None)
        while (tensors := following.result()) is not None:
            following = thread.submit(next, parts, None)
            columns = list(tensors.values())
            block = torch.stack(columns, dim=1) if len(columns) > 1 else columns[0]
            for batch in block[torch.randperm(len(block))].split(batch_size):
                parted = batch.unbind(1) if len(columns) > 1 else (batch,)
                rows += len(dict(zip(tensors, parted, strict=True)).popitem()[1])
    return rows


def petastorm(data: DatasetManifest, batch_size: int) -> int:
    """Shuffle and batch a pass with Petastorm's loader and a buffer as large as this package's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from petastorm import make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        row_bytes = sum(spec.width * np.dtype(spec.dtype).itemsize for spec in data.columns)
        capacity = max(min(data.train.rows, 128 * 2**20 // row_bytes), 2 * batch_size)
        url = Path(data.train.row_groups[0].file).as_uri()
        reader = make_batch_reader(url, num_epochs=1, workers_count=WORKERS, seed=1)
        with BatchedDataLoader(
            reader, batch_size=batch_size, shuffling_queue_capacity=capacity
        ) as loader:
            return sum(len(next(iter(batch.values()))) for batch in loader)


def ours(
    stack: contextlib.ExitStack,
    kind: type[PlannedDataModule],
    data: DatasetManifest,
    batch_size: int,
) -> Callable[[], float]:
    """Open one of this package's data modules.

    It reads ahead into the next pass. So an untimed pass comes first, and the timed passes run from
    the end of one pass to the end of another, as in training for many epochs.
    """
    plan = plan_shards(data.train.row_groups, 1)
    module = stack.enter_context(
        kind(
            train_dir=data.train.path,
            val_dir=None,
            columns=data.columns,
            train_plan=plan,
            train_batch_size=batch_size,
            train_reader_worker_count=WORKERS,
            num_train_epochs=1,
        )
    )
    batches, steps = tensor_batches(module.train_chunks()), plan.steps(batch_size)

    def take(steps: int) -> int:
        taken = itertools.islice(batches, steps)
        return sum(len(next(iter(batch.values()))) for batch in taken)

    def run() -> float:
        take(steps)
        started = time.perf_counter()
        rows = take(2 * steps)
        assert rows == 2 * data.train.rows
        return rows / (time.perf_counter() - started)

    return run


if __name__ == "__main__":
    main()
