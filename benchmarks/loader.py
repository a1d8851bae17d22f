"""Rows per second of the input pipeline, as tensors, against Petastorm's and plain decoding.

Runs in one process. All contenders run in turns, and the best of each counts, without the first
turn.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import need_baseline
from benchmarks.figures import Record, compared, parser, show_result, show_table
from benchmarks.loader_images import LOADER, ONE, of_jpegs
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
TRIES = 10


@dataclass(frozen=True)
class Data:
    """A Parquet file.

    Attributes
    ----------
    name : str
        Name of its content.
    manifest : DatasetManifest
        Its columns and row groups.
    batch_sizes : tuple of int
        The batch sizes to measure with.
    """

    name: str
    manifest: DatasetManifest
    batch_sizes: tuple[int, ...]

    @property
    def file(self) -> str:
        return self.manifest.train.row_groups[0].file

    @property
    def rows(self) -> int:
        return self.manifest.train.rows


Contender = Callable[[], tuple[int, float]]
"""Reads rows as tensors; returns their number and the seconds."""


def main() -> None:
    options_parser = parser(__doc__, rows=2_000_000, repeats=5)
    options_parser.add_argument("--jpegs", type=int, default=4000, help="rows of JPEGs; 0: none")
    options = options_parser.parse_args()
    need_baseline()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-loader-") as folder:
        for data in write(Path(folder), options.rows):
            results[data.name] = measure(data, options.repeats)
        records = records_of(results)
        if options.jpegs:
            speeds = of_jpegs(Path(folder, "jpegs"), options.jpegs, options.repeats)
            best = {name: max(each) for name, each in speeds.items()}
            table = [(n, s, s / best[ONE], s / best[LOADER]) for n, s in best.items()]
            header = ("contender", "rows/s", f"times {ONE}", f"of {LOADER}")
            show_table(
                f"images: {options.jpegs} JPEGs, decoded by transformation_fn", header, table
            )
            records += compared("images, batch 32", speeds, "rows/s", LOADER)
            results["jpegs"] = speeds
    settings = {"rows": options.rows, "workers": WORKERS}
    show_result("loader", settings, {"rows_per_second": results}, records)


def write(folder: Path, rows: int) -> Iterator[Data]:
    """Write the datasets, one at a time: narrow columns, a vector, images."""
    rng = np.random.default_rng(0)
    narrow = pa.table({f"x{i:02}": rng.standard_normal(rows, np.float32) for i in range(20)})
    yield _write(folder / "narrow", narrow, (1000, 256))
    few = rows // 4
    vector = pa.table({"vector": _lists(rng.standard_normal((few, 64), np.float32))})
    yield _write(folder / "vector", vector, (1000, 256))
    few = max(rows // 1000, 64)
    image = pa.table({"image": _lists(rng.integers(0, 256, (few, IMAGE), np.uint8))})
    yield _write(folder / "image", image, (32,))


def _lists(values: np.ndarray) -> pa.Array:
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.reshape(-1))


def _write(folder: Path, table: pa.Table, batch_sizes: tuple[int, ...]) -> Data:
    folder.mkdir()
    group = max(ROW_GROUP_BYTES * len(table) // table.nbytes, 1)
    parquet.write_table(table, folder / "part-0.parquet", row_group_size=group)
    manifest = read_manifest(LocalStore(str(folder)), str(folder), None, table.column_names)
    return Data(folder.name, manifest, batch_sizes)


def measure(data: Data, repeats: int) -> dict[str, list[float]]:
    """Time all contenders in turns; show the best of each, and return the rows per second."""
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Contender] = {DECODING: timed(decode, data)}
        for size in data.batch_sizes:
            contenders[f"BatchedDataLoader, batch {size}"] = timed(petastorm, data, size)
            for module in (PetastormDataModule, ArrowDataModule):
                name = f"ours, {module.short_name}, batch {size}"
                contenders[name] = ours(stack, module, data, size)
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(repeats + 1):
            for name, contender in contenders.items():
                # Petastorm's pool occasionally ends without a row; such a time does not count.
                for _ in range(TRIES):
                    rows, seconds = contender()
                    if rows:
                        break
                if not rows or rows % data.rows:
                    raise SystemExit(f"{name}: {rows} rows were delivered of {data.rows}.")
                if turn:
                    speeds[name].append(rows / seconds)
    best = {name: max(each) for name, each in speeds.items()}
    decoding = best[DECODING]
    table = []
    for name, speed in best.items():
        size = name.rpartition(" ")[2]
        loader = best.get(f"BatchedDataLoader, batch {size}") or float("nan")
        table.append((name, speed, speed / decoding, speed / loader))
    header = ("contender", "rows/s", "of decoding", "times BatchedDataLoader")
    show_table(f"{data.name}, {data.rows} rows", header, table)
    return speeds


def records_of(found: dict[str, dict[str, list[float]]]) -> list[Record]:
    """Return a table for each kind of data and batch size."""
    records: list[Record] = []
    for name, speeds in found.items():
        sizes = dict.fromkeys(of.rpartition(", ")[2] for of in speeds if ", batch " in of)
        for size in sizes:
            table = {
                of.removesuffix(f", {size}"): each
                for of, each in speeds.items()
                if of == DECODING or of.endswith(size)
            }
            records += compared(f"{name}, {size}", table, "rows/s", DECODING)
    return records


def timed(function: Callable[..., int], *arguments: Any) -> Contender:
    """Return a contender that is timed from its first to its last line."""

    def run() -> tuple[int, float]:
        started = time.perf_counter()
        rows = function(*arguments)
        return rows, time.perf_counter() - started

    return run


def decode(data: Data) -> int:
    """Decode every row group with all of PyArrow's threads, in stored order."""
    rows = 0
    with parquet.ParquetFile(data.file) as file:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index)
            for spec in data.manifest.columns:
                column = table.column(spec.name).combine_chunks()
                column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
                values = column.flatten() if spec.shape else column
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    tensor = torch.from_numpy(values.to_numpy())
                tensor.reshape(-1, *spec.shape)
            rows += len(table)
    return rows


def petastorm(data: Data, batch_size: int) -> int:
    """Shuffle and batch one pass with Petastorm's own loader."""
    with petastorm_batches(data, batch_size) as batches:
        return sum(len(next(iter(batch.values()))) for batch in batches)


@contextlib.contextmanager
def petastorm_batches(data: Data, batch_size: int, passes: int = 1) -> Iterator[Iterator[Any]]:
    """Open Petastorm's own loader, with a buffer about as large as this package's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from petastorm import make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        row_bytes = sum(
            spec.width * np.dtype(spec.dtype).itemsize for spec in data.manifest.columns
        )
        reader = make_batch_reader(
            Path(data.file).as_uri(), num_epochs=passes, workers_count=WORKERS, seed=1
        )
        capacity = max(min(data.rows, 128 * 2**20 // row_bytes), 2 * batch_size)
        with BatchedDataLoader(
            reader, batch_size=batch_size, shuffling_queue_capacity=capacity
        ) as loader:
            yield iter(loader)


def ours(
    stack: contextlib.ExitStack,
    kind: type[PlannedDataModule],
    data: Data,
    batch_size: int,
) -> Contender:
    """Open one of this package's data modules.

    It reads ahead into the next pass. So an untimed pass comes first, and the timed passes run from
    the end of one pass to the end of another, as in training for many epochs.
    """
    plan = plan_shards(data.manifest.train.row_groups, 1)
    module = stack.enter_context(
        kind(
            train_dir=data.manifest.train.path,
            val_dir=None,
            columns=data.manifest.columns,
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

    def run() -> tuple[int, float]:
        take(steps)
        started = time.perf_counter()
        rows = take(2 * steps)
        return rows, time.perf_counter() - started

    return run


if __name__ == "__main__":
    main()
