"""Peak resident memory of a rank that trains on much Parquet, against one that trains on little."""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.figures import Record, compared, parser, show_result, show_table
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

WIDTH = 64
ROW_GROUP_ROWS = 16 * 2**20 // (4 * WIDTH)
TIMES = 8
"""Size of the large dataset divided by that of the small one."""

SIZES = {"small": 1, "large": TIMES}

MOST = 1.10
"""Maximum ratio of the memory for the large dataset to that for the small one."""


class PeakMemory:
    """A callback that writes the rank's peak resident memory, in bytes, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.path.write_text(str(peak))


class Sum(torch.nn.Module):
    """A minimal trainable model, because the benchmark measures reading."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=1) * self.scale


def write(folder: Path, num_bytes: int) -> int:
    """Write files of 64 MiB; return the number of rows."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    groups = max(round(num_bytes / (16 * 2**20)), 1)
    offsets = np.arange(0, ROW_GROUP_ROWS * WIDTH + 1, WIDTH, dtype=np.int32)
    for first in range(0, groups, 4):
        writer = None
        for _ in range(first, min(first + 4, groups)):
            values = rng.standard_normal(ROW_GROUP_ROWS * WIDTH, np.float32)
            vector = pa.ListArray.from_arrays(offsets, values)
            table = pa.table({"x": vector, "y": values[::WIDTH]})
            writer = writer or parquet.ParquetWriter(
                folder / f"{first:04d}.parquet", table.schema, use_dictionary=False
            )
            writer.write_table(table, ROW_GROUP_ROWS)
        assert writer is not None
        writer.close()
    return groups * ROW_GROUP_ROWS


def repeat(small: Path, large: Path, times: int) -> None:
    """Create a dataset of several hard links to each file of another dataset."""
    large.mkdir(parents=True)
    for file in sorted(small.iterdir()):
        for number in range(times):
            os.link(file, large / f"{number}-{file.name}")


def peak_of(folder: Path, data: Path, reader: str, options: argparse.Namespace) -> float:
    """Train one rank for an epoch in a separate process; return its peak memory in MiB."""
    net = Sum()
    path = folder / "peak"
    store = Store.create(str(folder / "store"), train_path=str(data), save_runs=False)
    TorchEstimator(
        backend=LocalBackend(1),
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=options.batch_size,
        callbacks=[PeakMemory(path)],
        data_module=reader,
        verbose=0,
    ).fit_on_parquet()
    return int(path.read_text()) / 2**20


def main() -> None:
    options_parser = parser(__doc__, rows=2**30 // (4 * WIDTH), repeats=1)
    options_parser.add_argument("--batch-size", type=int, default=4096)
    options = options_parser.parse_args()
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-memory-") as name:
        folder = Path(name)
        rows = write(folder / "small", options.rows * 4 * WIDTH)
        repeat(folder / "small", folder / "large", TIMES)
        for reader in ("petastorm", "arrow"):
            taken[reader] = {
                size: [
                    peak_of(folder, folder / size, reader, options) for _ in range(options.repeats)
                ]
                for size in SIZES
            }
    peaks = {
        reader: {size: min(of) for size, of in sizes.items()} for reader, sizes in taken.items()
    }
    gib = rows * 4 * WIDTH / 2**30
    table: list[tuple[Any, ...]] = []
    records: list[Record] = []
    for reader, peak in peaks.items():
        ratio = peak["large"] / peak["small"]
        met = "met" if ratio <= MOST else "MISSED"
        table.append((reader, peak["small"], peak["large"], ratio, met))
        named = {f"{gib * times:.2g} GiB": taken[reader][size] for size, times in SIZES.items()}
        records += compared(f"peak of a rank, {reader}", named, "MiB", f"{gib:.2g} GiB")
    header = ("reader", f"MiB at {gib:.2g} GiB", f"MiB at {TIMES * gib:.2g} GiB", "ratio", MOST)
    show_table("peak resident memory of a rank", [str(cell) for cell in header], table)
    show_result("memory", vars(options), {"peak_mib": taken}, records)


if __name__ == "__main__":
    main()
