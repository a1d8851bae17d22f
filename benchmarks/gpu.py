"""Rows per second into models and through `transform` on a GPU, allreduces and sharding on GPUs.

Contenders run in turns, and the best of each counts, without the first turn. Spark's tasks share
the GPU. Without Java, leave `transform` out (``--images 0``). Sharding needs two GPUs or more
(``--gpus``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from benchmarks.common import lists, spark_and_folder
from benchmarks.figures import Record, compared, in_turns, options, show_result
from benchmarks.memory import peaks_by_sharding, write
from benchmarks.transform import IMAGE as SMALL_IMAGE
from benchmarks.transform import OUTPUTS, image_data, of_images
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.launch import LocalBackend
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore
from hvd_estimators.torch.collectives import session
from hvd_estimators.torch.tensors import TensorSpec, gpu_memory, tensor_batches

COLUMNS = 20
IMAGE = (3, 224, 224)
CLASSES = 100
ROW_GROUP_BYTES = 16 * 2**20
HELD = 8
"""Batches on the GPU for the rate of the model alone."""
SECONDS = 2.0
"""Seconds that a contender runs in each turn."""

Batches = Iterator[Mapping[str, torch.Tensor]]
MODEL = "the model alone, rows on the GPU"
Step = Callable[[Mapping[str, torch.Tensor]], int]
"""Trains on a batch; returns its number of rows."""


@dataclass(frozen=True)
class Case:
    """A model, and a Parquet file of its rows; the step trains the model on a batch."""

    name: str
    manifest: DatasetManifest
    batch_size: int
    step: Step


def main() -> None:
    workers = min(os.cpu_count() or 1, 8)
    given = options(
        __doc__,
        rows=2_000_000,
        images=8_000,
        parameters=4e8,
        workers=workers,
        gpus=1,
        repeats=3,
        cpu=False,
    )
    if not given.cpu and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here. Run it where there is one, or with --cpu.")
    device = torch.device("cpu" if given.cpu else "cuda:0")
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-gpu-") as folder:
        for case in cases(Path(folder), given.rows, max(given.images, 64), device):
            speeds = measure(case, device, workers, given.repeats)
            records += compared(case.name, speeds, "rows/s", MODEL)
        if given.gpus > 1:
            write(Path(folder, "small"), 2**26)
            sharded = peaks_by_sharding(
                Path(folder), Path(folder, "small"), int(given.parameters), given.gpus
            )
            peaks = {name: [max(of)] for name, (of, _) in sharded.items()}
            table = f"peak of a rank, {given.parameters:.0e} parameters with Adam"
            records += compared(table, peaks, "MiB", "whole")
    reduced = LocalBackend(given.gpus).run(reduce, (not given.cpu,))[0]
    records += compared(f"allreduce of 64 MiB, {given.gpus} ranks", reduced, "GiB/s")
    if given.images:
        net = Convnet(device.type == "cuda", OUTPUTS).eval()
        with spark_and_folder(workers) as (spark, _):
            frame = image_data(spark, given.images, workers)
            taken = of_images(spark, net, frame, given.repeats, device.type)
        speed = {name: [given.images / each for each in of] for name, of in taken.items()}
        speed["the network alone"] = [alone(net.to(device), device)]
        records += compared("transform of images 3x64x64", speed, "rows/s", "to Python alone")
    show_result("gpu", vars(given), records)


def reduce(use_gpu: bool) -> dict[str, list[float]]:
    """Sum 64 MiB over the ranks; return the rate by library. Runs on every rank."""
    with session("torch", use_gpu=use_gpu):
        device = torch.device("cuda" if use_gpu else "cpu")
        values, taken = torch.ones(2**24, device=device), []
        for _ in range(6):
            started = time.perf_counter()
            torch.distributed.all_reduce(values)
            _wait(device)
            taken.append(values.nbytes / 2**30 / (time.perf_counter() - started))
        return {torch.distributed.get_backend(): taken[1:]}


def alone(net: torch.nn.Module, device: torch.device) -> float:
    """Return the rows per second of forward passes on one batch, which is on the device."""
    rows = torch.rand(128, *SMALL_IMAGE, device=device)
    with torch.inference_mode():
        net(rows)
        _wait(device)
        started = time.perf_counter()
        for _ in range(10):
            net(rows)
        _wait(device)
    return 10 * len(rows) / (time.perf_counter() - started)


def cases(folder: Path, rows: int, images: int, device: torch.device) -> Iterator[Case]:
    """Write the data and build the models, one case at a time."""
    rng = np.random.default_rng(0)
    names = [f"x{index:02}" for index in range(COLUMNS)]
    narrow = {name: rng.standard_normal(rows, np.float32) for name in [*names, "y"]}
    manifest = _write(folder / "narrow", pa.table(narrow))
    yield Case("20 columns, MLP", manifest, 4096, mlp(tuple(names), device))
    pixels = lists(rng.integers(0, 256, (images, int(np.prod(IMAGE))), np.uint8))
    table = pa.table({"image": pixels, "y": rng.integers(0, CLASSES, images)})
    manifest = _write(folder / "image", table)
    yield Case("images, convnet", manifest, 128 if device.type == "cuda" else 4, convnet(device))


def _write(folder: Path, table: pa.Table) -> DatasetManifest:
    folder.mkdir()
    group = max(ROW_GROUP_BYTES * len(table) // table.nbytes, 1)
    parquet.write_table(table, folder / "part-0.parquet", row_group_size=group)
    return read_manifest(LocalStore(str(folder)), str(folder), None, table.column_names)


def mlp(names: tuple[str, ...], device: torch.device) -> Step:
    """Return a step of a network with two layers of 256, with Adam."""
    spec = TensorSpec(names, ("y",))
    layers = torch.nn.Sequential(
        torch.nn.Linear(len(names), 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    ).to(device)
    optimizer = torch.optim.Adam(layers.parameters())

    def step(columns: Mapping[str, torch.Tensor]) -> int:
        batch = spec.batch(columns, device)
        outputs = layers(torch.stack(batch.inputs, dim=1)).squeeze(1)
        loss = torch.nn.functional.mse_loss(outputs, batch.labels[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch.rows

    return step


class Block(torch.nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = torch.nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.two = torch.nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(out), torch.nn.BatchNorm2d(out)])
        self.past = torch.nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(self.norms[1](self.two(y)) + self.past(x))


class Convnet(torch.nn.Sequential):
    """A network about the size of ResNet-18."""

    def __init__(self, is_large: bool, outputs: int) -> None:
        widths = (64, 128, 256, 512) if is_large else (4, 4, 4, 4)
        blocks: list[torch.nn.Module] = []
        for before, width, stride in zip((widths[0], *widths), widths, (1, 2, 2, 2), strict=False):
            blocks += [Block(before, width, stride), Block(width, width, 1)]
        super().__init__(
            torch.nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            torch.nn.BatchNorm2d(widths[0]),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(3, 2, 1),
            *blocks,
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(widths[-1], outputs),
        )


def convnet(device: torch.device) -> Step:
    """Return a step in bfloat16, with momentum."""
    model = Convnet(device.type == "cuda", CLASSES).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spec = TensorSpec(("image",), ("y",), None, ((-1, *IMAGE),), dtypes={"y": "int64"})

    def step(columns: Mapping[str, torch.Tensor]) -> int:
        batch = spec.batch(columns, device)
        images = batch.inputs[0].div(255).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), batch.labels[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return batch.rows

    return step


def measure(case: Case, device: torch.device, workers: int, repeats: int) -> dict[str, list[float]]:
    """Return the rows per second of all contenders."""
    with contextlib.ExitStack() as stack:
        alone, plain, beside = (
            stack.enter_context(contextlib.closing(batches(stack, case, workers, where)))
            for where in ("cpu", "cpu", device)
        )
        held = [
            {name: tensor.to(device, copy=True) for name, tensor in batch.items()}
            for batch in itertools.islice(alone, HELD)
        ]
        contenders: dict[str, Callable[[], float]] = {
            MODEL: lambda: rate(itertools.cycle(held), case.step, device),
            "the loader alone": lambda: rate(alone, rows_of, device),
            "plain copies": lambda: rate(plain, case.step, device),
            "pinned, beside the step": lambda: rate(beside, case.step, device),
        }
        return in_turns(contenders, repeats, warm_up=1)


def batches(
    stack: contextlib.ExitStack, case: Case, workers: int, device: torch.device | str
) -> Any:
    """Open a data module; return its training batches, without end."""
    plan = plan_shards(case.manifest.train.row_groups, 1)
    module = stack.enter_context(
        ArrowDataModule(
            train_dir=case.manifest.train.path,
            val_dir=None,
            columns=case.manifest.columns,
            train_plan=plan,
            train_batch_size=case.batch_size,
            train_reader_worker_count=workers,
            num_train_epochs=1,
        )
    )
    module.memory = gpu_memory(torch.device(device)) or module.memory
    return tensor_batches(module.train_chunks(), device)


def rows_of(columns: Mapping[str, torch.Tensor]) -> int:
    """Return a batch's number of rows, without training on it."""
    return len(next(iter(columns.values())))


def rate(batches: Batches, step: Step, device: torch.device) -> float:
    """Return the rows per second over `SECONDS`, after a warm-up of a quarter of it."""
    for seconds in (SECONDS / 4, SECONDS):
        rows, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            rows += sum(step(columns) for columns in itertools.islice(batches, 8))
        _wait(device)
    return rows / (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
