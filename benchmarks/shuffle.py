"""Accuracy after a pass over sorted rows in row groups of some sizes, and in random order.

The data modules of two ranks are read in one process, and their batches are joined to the rows on
which N ranks train.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import lists
from benchmarks.figures import compared, options, show_result
from hvd_estimators import Store
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.loading.shuffle import SHUFFLE_BUFFER_BYTES

RANKS = 2
WIDTH, LABELS, BATCH = 64, 10, 256

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

    def accuracy(self, batches: Joined) -> float:
        """Train for one pass; return the accuracy on other rows."""
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, LABELS)
        )
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for x, y in batches:
            loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        test = np.tile(np.arange(LABELS), 2000)
        with torch.inference_mode():
            found = net(torch.from_numpy(self.features(test, 2))).argmax(1).numpy()
        return float((found == test).mean())


def write(file: Path, task: Task, group_bytes: int) -> None:
    """Write the rows, sorted by label, in row groups of a given size."""
    file.parent.mkdir(parents=True)
    labels = task.labels()
    rows = max(min(group_bytes // (4 * WIDTH), task.rows), 1)
    writer = None
    for start in range(0, task.rows, rows):
        some = labels[start : start + rows]
        table = pa.table({"x": lists(task.features(some, 1000 + start)), "y": some})
        writer = writer or parquet.ParquetWriter(file, table.schema, use_dictionary=["y"])
        writer.write_table(table, rows)
    assert writer is not None
    writer.close()


def ours(manifest: DatasetManifest, buffer_bytes: int) -> Joined:
    """Read with the data modules of all ranks as the estimators do."""
    groups = manifest.train.row_groups
    plan = plan_shards(groups, RANKS, seed=1, open_bytes=buffer_bytes)
    with contextlib.ExitStack() as stack:
        modules = [
            stack.enter_context(
                ArrowDataModule(
                    train_dir=manifest.train.path,
                    val_dir=None,
                    columns=manifest.columns,
                    train_plan=plan,
                    cur_shard=rank,
                    shard_count=RANKS,
                    train_batch_size=BATCH,
                    random_seed=1,
                    shuffle_buffer_size=buffer_bytes,
                )
            )
            for rank in range(RANKS)
        ]
        steps = zip(*(module.train_data() for module in modules), strict=True)
        for step in itertools.islice(steps, plan.steps(BATCH)):
            x, y = (np.concatenate([batch[name] for batch in step]) for name in ("x", "y"))
            yield x, y


def random_order(task: Task) -> Joined:
    """Generate batches in random order: their labels are a shuffle of all labels."""
    labels = np.random.default_rng(3).permutation(task.labels())
    for step, start in enumerate(range(0, task.rows, RANKS * BATCH)):
        some = labels[start : start + RANKS * BATCH]
        yield task.features(some, 10_000_000 + step), some


def main() -> None:
    given = options(__doc__, rows=2**30 // (4 * WIDTH), small=False, repeats=1)
    eighth = 8 if given.small else 1
    rows = given.rows // eighth
    centres = 0.33 * np.random.default_rng(0).standard_normal((LABELS, WIDTH)).astype(np.float32)
    task, total = Task(rows, centres), rows * 4 * WIDTH
    torch.set_num_threads(1)
    found = {"random order": [task.accuracy(random_order(task))]}
    layouts = {"16 MiB groups": total // 64, "128 MiB groups": total // 8, "one group": total}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-shuffle-") as name:
        for layout, size in layouts.items():
            file = Path(name, layout.replace(" ", "-"), "part-0.parquet")
            write(file, task, size)
            manifest = read_manifest(Store.create(name), str(file.parent), None, ["x", "y"])
            batches = ours(manifest, SHUFFLE_BUFFER_BYTES // eighth)
            found[f"{layout}, arrow"] = [task.accuracy(batches)]
            file.unlink()
    show_result("shuffle", vars(given), compared("accuracy", found, "", "random order"))


if __name__ == "__main__":
    main()
