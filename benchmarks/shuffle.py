"""Mixing of sorted rows and its effect on training, compared with perfect random order.

The data modules of two ranks are read in one process, and their batches are joined to the rows on
which N ranks train.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import spark_session
from benchmarks.figures import compared, parser, show_result, show_table
from hvd_estimators import Store, prepare_data
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.loading.petastorm import PetastormDataModule
from hvd_estimators.loading.plan import order_warning, plan_shards
from hvd_estimators.loading.readers import ArrowDataModule, PlannedDataModule
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES
from hvd_estimators.prepare.datasets import load_manifest

RANKS = 2
WIDTH, LABELS, BATCH = 64, 10, 256
IMAGE, IMAGE_LABELS, IMAGE_BATCH = 224 * 224 * 3, 100, 32
READERS: tuple[type[PlannedDataModule], ...] = (PetastormDataModule, ArrowDataModule)

Joined = Iterator[tuple[np.ndarray, np.ndarray]]
"""Features and labels of the batches of all ranks, joined step by step."""


@dataclass(frozen=True)
class Task:
    """Rows sorted by label: normal numbers around a centre of each label."""

    rows: int
    centres: np.ndarray

    def labels(self) -> np.ndarray:
        return np.arange(self.rows, dtype=np.int64) * LABELS // self.rows

    def features(self, labels: np.ndarray, seed: int) -> np.ndarray:
        noise = np.random.default_rng(seed).standard_normal((len(labels), WIDTH), np.float32)
        return self.centres[labels] + noise

    def accuracy(self, batches: Joined) -> tuple[float, float, float]:
        """Train for one pass; return accuracy, labels in a batch, and those in the last tenth."""
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, LABELS)
        )
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        distinct = []
        for x, y in batches:
            distinct.append(len(np.unique(y)))
            loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        test = np.tile(np.arange(LABELS), 2000)
        with torch.inference_mode():
            found = net(torch.from_numpy(self.features(test, 2))).argmax(1).numpy()
        last = distinct[-max(len(distinct) // 10, 1) :]
        return float((found == test).mean()), float(np.mean(distinct)), float(np.mean(last))


def vectors(values: np.ndarray) -> pa.Array:
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.reshape(-1))


def write(file: Path, task: Task, group_bytes: int) -> None:
    """Write the rows, sorted by label, in row groups of a given size."""
    file.parent.mkdir(parents=True)
    labels = task.labels()
    rows = max(min(group_bytes // (4 * WIDTH), task.rows), 1)
    writer = None
    for start in range(0, task.rows, rows):
        some = labels[start : start + rows]
        table = pa.table({"x": vectors(task.features(some, 1000 + start)), "y": some})
        writer = writer or parquet.ParquetWriter(file, table.schema, use_dictionary=["y"])
        writer.write_table(table, rows)
    assert writer is not None
    writer.close()


@contextlib.contextmanager
def opened(
    manifest: DatasetManifest, kind: type[PlannedDataModule], batch_size: int, buffer_bytes: int
) -> Iterator[Iterator[list[dict[str, np.ndarray]]]]:
    """Open the data modules of all ranks as the estimators do; yield the batches of each step."""
    groups = manifest.train.row_groups
    plan = plan_shards(groups, RANKS, seed=1, open_bytes=0 if manifest.shuffled else buffer_bytes)
    warning = order_warning(groups, plan, manifest.columns, buffer_bytes)
    if warning and not manifest.shuffled:
        print(f"  {warning}")
    with contextlib.ExitStack() as stack:
        modules = [
            stack.enter_context(
                kind(
                    train_dir=manifest.train.path,
                    val_dir=None,
                    columns=manifest.columns,
                    train_plan=plan,
                    cur_shard=rank,
                    shard_count=RANKS,
                    train_batch_size=batch_size,
                    random_seed=1,
                    shuffle_buffer_size=buffer_bytes,
                )
            )
            for rank in range(RANKS)
        ]
        steps = zip(*(module.train_data() for module in modules), strict=True)
        yield (list(step) for step in itertools.islice(steps, plan.steps(batch_size)))


def ours(manifest: DatasetManifest, kind: type[PlannedDataModule], buffer_bytes: int) -> Joined:
    with opened(manifest, kind, BATCH, buffer_bytes) as steps:
        for step in steps:
            x, y = (np.concatenate([batch[name] for batch in step]) for name in ("x", "y"))
            yield x, y


def random_order(task: Task) -> Joined:
    """Generate batches in random order: their labels are a shuffle of all labels."""
    labels = np.random.default_rng(3).permutation(task.labels())
    for step, start in enumerate(range(0, task.rows, RANKS * BATCH)):
        some = labels[start : start + RANKS * BATCH]
        yield task.features(some, 10_000_000 + step), some


def petastorm(folder: Path) -> Joined:
    """Read as horovod.spark's torch estimator does: Petastorm shards and shuffles."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", FutureWarning)
        from petastorm import make_batch_reader
        from petastorm.pytorch import BatchedDataLoader

        loaders = []
        for rank in range(RANKS):
            reader = make_batch_reader(
                folder.as_uri(),
                num_epochs=1,
                cur_shard=rank,
                shard_count=RANKS,
                workers_count=2,
                shuffle_rows=True,
                shuffle_row_groups=True,
                seed=1,
            )
            loader = BatchedDataLoader(reader, batch_size=BATCH, shuffling_queue_capacity=0)
            loaders.append(iter(stack.enter_context(loader)))
        for step in zip(*loaders, strict=False):
            x, y = (np.concatenate([b[name].numpy() for b in step]) for name in ("x", "y"))
            yield x, y


@contextlib.contextmanager
def prepared(source: Path, folder: Path) -> Iterator[DatasetManifest]:
    """Write sorted rows with prepare_data."""
    store = Store.create(str(folder))
    with spark_session(RANKS) as spark:
        frame = spark.read.parquet(str(source))
        with prepare_data(RANKS, store, frame, ["y"], ["x"]) as index:
            yield load_manifest(store, index)


def train_on_layouts(rows: int, buffer_bytes: int, folder: Path) -> list[tuple[Any, ...]]:
    """Train on each layout with each reader; return a row of the table for each."""
    centres = 0.33 * np.random.default_rng(0).standard_normal((LABELS, WIDTH)).astype(np.float32)
    task = Task(rows, centres)
    total = rows * 4 * WIDTH
    results: list[tuple[Any, ...]] = []

    def measure(name: str, batches: Joined) -> None:
        results.append((name, *task.accuracy(batches)))
        print(results[-1], flush=True)

    measure("random order", random_order(task))
    layouts = {"16 MiB groups": total // 64, "128 MiB groups": total // 8, "one group": total}
    for name, size in layouts.items():
        file = folder / name.replace(" ", "-") / "part-0.parquet"
        write(file, task, size)
        manifest = read_manifest(
            Store.create(str(folder / "store")), str(file.parent), None, ["x", "y"]
        )
        for kind in READERS:
            measure(f"{name}, {kind.short_name}", ours(manifest, kind, buffer_bytes))
        if name == "16 MiB groups":
            measure(f"{name}, as horovod.spark reads", petastorm(file.parent))
            with prepared(file.parent, folder / "prepared") as manifest:
                for kind in READERS:
                    measure(f"prepare_data, {kind.short_name}", ours(manifest, kind, buffer_bytes))
        file.unlink()
    return results


def labels_of_images(images: int, buffer_bytes: int, folder: Path) -> list[tuple[Any, ...]]:
    """Count the labels in each joined batch of images, sorted by 100 labels."""
    labels = np.arange(images) * IMAGE_LABELS // images
    rng = np.random.default_rng(0)
    batch = RANKS * IMAGE_BATCH
    shares = np.bincount(labels) / images
    ideal = float((1 - (1 - shares) ** batch).sum())
    results: list[tuple[Any, ...]] = [("random order", ideal, 1.0)]
    group = max(buffer_bytes // 8 // IMAGE, 1)
    for stored in ("lists", "bytes"):
        file = folder / f"images-{stored}" / "part-0.parquet"
        file.parent.mkdir()
        writer = None
        for start in range(0, images, group):
            some = labels[start : start + group]
            pixels = rng.integers(0, 256, (len(some), IMAGE), np.uint8)
            column = vectors(pixels) if stored == "lists" else [p.tobytes() for p in pixels]
            table = pa.table({"image": column, "label": some})
            writer = writer or parquet.ParquetWriter(file, table.schema, use_dictionary=False)
            writer.write_table(table, group)
        assert writer is not None
        writer.close()
        store = Store.create(str(folder / "store"))
        manifest = read_manifest(store, str(file.parent), None, ["image", "label"])
        for kind in READERS:
            with opened(manifest, kind, IMAGE_BATCH, buffer_bytes) as steps:
                found = [
                    len(np.unique(np.concatenate([b["label"] for b in step])))
                    for step in steps
                    if sum(len(b["label"]) for b in step) == batch
                ]
            mean = float(np.mean(found))
            results.append((f"{stored}, {kind.short_name}", mean, mean / ideal))
            print(results[-1], flush=True)
        file.unlink()
    return results


def main() -> None:
    options_parser = parser(__doc__, rows=2**30 // (4 * WIDTH), repeats=1)
    options_parser.add_argument("--images", type=int, default=2**30 // IMAGE, help="images")
    options_parser.add_argument(
        "--small", action="store_true", help="an eighth of all rows, sizes and memory"
    )
    options = options_parser.parse_args()
    eighth = 8 if options.small else 1
    buffer_bytes = SHUFFLE_BUFFER_BYTES // eighth
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-shuffle-") as name:
        trained = train_on_layouts(options.rows // eighth, buffer_bytes, Path(name))
        images = labels_of_images(options.images // eighth, buffer_bytes, Path(name))
    best = trained[0][1]
    header = ("layout and reader", "accuracy", "of random", "labels", "in the last tenth")
    table = [(name, accuracy, accuracy - best, *rest) for name, accuracy, *rest in trained]
    show_table(f"{options.rows} rows sorted by {LABELS} labels, one pass", header, table)
    header = ("images", "labels in a batch", "of random order")
    show_table(f"{options.images} images sorted by {IMAGE_LABELS} labels", header, images)
    records = [
        *compared("accuracy", {row[0]: [row[1]] for row in trained}, "", "random order"),
        *compared("labels in a batch", {row[0]: [row[2]] for row in trained}, "", "random order"),
        *compared("labels of images", {row[0]: [row[1]] for row in images}, "", "random order"),
    ]
    show_result("shuffle", vars(options), {"trained": trained, "images": images}, records)


if __name__ == "__main__":
    main()
