"""Peak resident memory of a rank: on much Parquet against little, and sharded against whole."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from benchmarks.common import lists
from benchmarks.figures import Record, compared, options, show_result
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

WIDTH = 64
ROW_GROUP_ROWS = 16 * 2**20 // (4 * WIDTH)
TIMES = 8
"""Size of the large dataset divided by that of the small one."""

BATCH = 4096
SHARDED_RANKS = 4


class PeakMemory:
    """A callback that writes the peak memory of the rank, or of its GPU, in bytes to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_initialized():
            peak = torch.cuda.max_memory_allocated()
        with open(self.path, "a") as file:
            file.write(f"{peak}\n")


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
    for first in range(0, groups, 4):
        writer = None
        for _ in range(first, min(first + 4, groups)):
            values = rng.standard_normal((ROW_GROUP_ROWS, WIDTH), np.float32)
            table = pa.table({"x": lists(values), "y": values[:, 0]})
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


def peak_of(folder: Path, data: Path, reader: str) -> float:
    """Train one rank for an epoch in a separate process; return its peak memory in MiB."""
    net = Sum()
    path = folder / "peak"
    path.unlink(missing_ok=True)
    store = Store.create(str(folder / "store"), train_path=str(data), save_runs=False)
    TorchEstimator(
        backend=LocalBackend(1),
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-6),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=BATCH,
        callbacks=[PeakMemory(path)],
        data_module=reader,
        verbose=0,
    ).fit_on_parquet()
    return int(path.read_text()) / 2**20


class Blocks(torch.nn.Module):
    """Layers of equal width, whose weights are all of the model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        made = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(1, self.layers[0].in_features // WIDTH)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean(dim=1)


def write_weights(path: str, width: int, layers: int) -> None:
    """Write weights of `Blocks`. Runs in a process of its own, whose memory does not count."""
    save_file(Blocks(width, layers).state_dict(), path)


def peaks_by_sharding(
    folder: Path, data: Path, parameters: int, ranks: int = SHARDED_RANKS
) -> dict[str, tuple[list[float], float]]:
    """Train with and without sharding; return MiB of each rank, and MiB that the driver needed."""
    width = 4096
    layers = max(round(parameters / width**2), 1)
    weights = str(folder / "begin.safetensors")
    child = multiprocessing.get_context("spawn").Process(
        target=write_weights, args=(weights, width, layers)
    )
    child.start()
    child.join()
    found = {}
    for name, num_proc, sharding in (("whole", 1, "none"), ("sharded", ranks, "full")):
        path = folder / f"peak-{name}"
        # Lets the kernel count the peak of this process from here.
        Path("/proc/self/clear_refs").write_text("5")
        before = _driver_bytes("VmRSS")
        TorchEstimator(
            backend=LocalBackend(num_proc),
            store=Store.create(str(folder / f"store-{name}"), train_path=str(data)),
            model=Blocks,
            model_args={"width": width, "layers": layers},
            init_weights=weights,
            optimizer=functools.partial(torch.optim.Adam, lr=1e-4),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["x"],
            label_cols=["y"],
            batch_size=8,
            train_steps_per_epoch=2,
            callbacks=[PeakMemory(path)],
            sharding=sharding,
            verbose=0,
        ).fit_on_parquet()
        driver = (_driver_bytes("VmHWM") - before) / 2**20
        found[name] = [int(line) / 2**20 for line in path.read_text().split()], driver
    return found


def _driver_bytes(field: str) -> int:
    (line,) = (n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    given = options(__doc__, rows=2**30 // (4 * WIDTH), parameters=4e8, repeats=1)
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-memory-") as name:
        folder = Path(name)
        gib = write(folder / "small", given.rows * 4 * WIDTH) * 4 * WIDTH / 2**30
        repeat(folder / "small", folder / "large", TIMES)
        sizes = {"small": f"{gib:.2g} GiB", "large": f"{gib * TIMES:.2g} GiB"}
        for reader in ("petastorm", "arrow"):
            peaks = {
                shown: [peak_of(folder, folder / size, reader) for _ in range(given.repeats)]
                for size, shown in sizes.items()
            }
            records += compared(f"peak of a rank, {reader}", peaks, "MiB", sizes["small"])
        sharded = peaks_by_sharding(folder, folder / "small", int(given.parameters))
    of_model = f"{given.parameters:.0e} parameters with Adam"
    ranks = {name: [max(of)] for name, (of, _) in sharded.items()}
    drivers = {name: [driver] for name, (_, driver) in sharded.items()}
    records += compared(f"peak of a rank, {of_model}", ranks, "MiB", "whole")
    records += compared(f"need of the driver, {of_model}", drivers, "MiB", "whole")
    show_result("memory", vars(given), records)


if __name__ == "__main__":
    main()
