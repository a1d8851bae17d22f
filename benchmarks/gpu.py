"""GPUs that processes see, NCCL, and rows per second into models on a GPU.

Needs torch with CUDA and PyArrow, but not TensorFlow, Petastorm or Spark. Horovod is measured if it
can be imported. Contenders run in turns, and the best of each counts, without the first turn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
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

from benchmarks.figures import compared, parser, show_result, show_table
from hvd_estimators.data.discovery import read_manifest
from hvd_estimators.data.manifest import DatasetManifest
from hvd_estimators.launch.gpus import rank_gpus
from hvd_estimators.loading.plan import plan_shards
from hvd_estimators.loading.readers import ArrowDataModule
from hvd_estimators.store import LocalStore
from hvd_estimators.torch.tensors import TensorSpec, gpu_memory, tensor_batches

WIDTH = 64
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
    """A model and its rows.

    Attributes
    ----------
    name : str
        Name of the case.
    manifest : DatasetManifest
        A Parquet file.
    batch_size : int
        Rows of a batch.
    step : callable
        Trains the model on a batch.
    """

    name: str
    manifest: DatasetManifest
    batch_size: int
    step: Step

    @property
    def rows(self) -> int:
        return int(self.manifest.train.rows)


def main() -> None:
    options_parser = parser(__doc__, rows=2_000_000, repeats=3)
    options_parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8))
    options_parser.add_argument("--images", type=int, default=8_000, help="rows of images")
    options_parser.add_argument("--cpu", action="store_true", help="try it without a GPU, quickly")
    options = options_parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here. Run it where there is one, or with --cpu.")
    device = torch.device("cpu" if options.cpu else "cuda:0")
    figures: dict[str, Any] = {"device": device_facts(device)}
    print(json.dumps(figures["device"]), flush=True)
    if not options.cpu:
        figures["pins"] = pins()
    figures["horovod"] = horovod(device)
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-gpu-") as folder:
        figures["loader"] = {
            case.name: measure(case, device, options.workers, options.repeats)
            for case in cases(Path(folder), options.rows, options.images, device)
        }
    settings = {"rows": options.rows, "images": options.images, "workers": options.workers}
    records = [
        record
        for case, of in figures["loader"].items()
        for record in compared(
            case, {name: [one["rows_per_second"]] for name, one in of.items()}, "rows/s", MODEL
        )
    ]
    show_result("gpu", settings, figures, records)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Describe the GPU."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return facts


def pins() -> dict[str, Any]:
    """Start processes with the environment of a rank, and return the GPUs that each sees."""
    (known,) = [gpu for gpu in _seen_with(None) if gpu["index"] == 0]
    uuid = f"GPU-{known['uuid']}"
    figures: dict[str, Any] = {}
    for name, addresses in {"by index": ["0"], "by UUID": [uuid]}.items():
        seen = _seen_with(rank_gpus(addresses, addresses, 0, 1, {})["CUDA_VISIBLE_DEVICES"])
        figures[name] = {"gpus": len(seen), "is_the_one": seen[:1] == [known]}
    figures["hidden"] = {"gpus": len(_seen_with("-1"))}
    show_table("pins", ("variable", "what it sees"), [(k, str(v)) for k, v in figures.items()])
    return figures


def _seen_with(variable: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that torch sees in a separate process."""
    code = (
        "import json, torch\n"
        "seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps([{'index': i, 'uuid': str(gpu.uuid)} for i, gpu in enumerate(seen)]))"
    )
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    if variable is not None:
        env["CUDA_VISIBLE_DEVICES"] = variable
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True)
    seen: list[dict[str, Any]] = json.loads(done.stdout.decode().splitlines()[-1])
    return seen


def horovod(device: torch.device) -> dict[str, Any]:
    """Run an allreduce on one rank, and on two that share the GPU, started as by a backend."""
    if importlib.util.find_spec("horovod") is None:
        return {"built": "Horovod is not installed"}
    from hvd_estimators.launch import LocalBackend

    figures: dict[str, Any] = {}
    for ranks in (1, 2):
        started = time.perf_counter()
        try:
            found = LocalBackend(ranks).run(reduce_on, (device.type,))
        except Exception as error:
            text = str(error).strip().splitlines()
            figures[f"{ranks} ranks"] = {
                "error": type(error).__name__,
                "says": text[:3] + text[-2:],
            }
        else:
            figures[f"{ranks} ranks"] = found[0]
        figures[f"{ranks} ranks"]["seconds"] = time.perf_counter() - started
        print(f"\n{ranks} ranks of Horovod: {json.dumps(figures[f'{ranks} ranks'])}", flush=True)
    return figures


def reduce_on(kind: str) -> dict[str, Any]:
    """Average 64 MiB over the ranks; return Horovod's state and the rate. Runs on every rank."""
    import horovod.torch as hvd

    hvd.init()
    visible = torch.cuda.device_count() if kind == "cuda" else 0
    device = torch.device(kind, hvd.local_rank() % visible) if visible else torch.device("cpu")
    values = torch.full((2**24,), float(hvd.rank() + 1), device=device)
    mean = (hvd.size() + 1) / 2
    reduced = hvd.allreduce(values, name="warm up")
    started = time.perf_counter()
    for turn in range(5):
        reduced = hvd.allreduce(values, name=f"turn {turn}")
    is_right = bool((reduced == mean).all())
    took = time.perf_counter() - started
    return {
        "visible": visible,
        "variable": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "device": str(reduced.device),
        "nccl_built": int(hvd.nccl_built()),
        "gloo_built": bool(hvd.gloo_built()),
        "is_right": is_right,
        "gib_per_second": 5 * values.nbytes / 2**30 / took,
    }


def cases(folder: Path, rows: int, images: int, device: torch.device) -> Iterator[Case]:
    """Write the data and build the models, one case at a time."""
    rng = np.random.default_rng(0)
    names = [f"x{index:02}" for index in range(COLUMNS)]
    narrow = {name: rng.standard_normal(rows, np.float32) for name in names}
    table = pa.table({**narrow, "y": rng.standard_normal(rows, np.float32)})
    spec = TensorSpec(tuple(names), ("y",))
    yield Case(
        "20 columns, MLP", _write(folder / "narrow", table), 4096, mlp(spec, COLUMNS, device)
    )
    few = rows // 4
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(rng.standard_normal(few * WIDTH, np.float32)), WIDTH
    )
    table = pa.table({"x": vectors, "y": rng.standard_normal(few, np.float32)})
    spec = TensorSpec(("x",), ("y",))
    yield Case("vector, MLP", _write(folder / "vector", table), 4096, mlp(spec, WIDTH, device))
    width = int(np.prod(IMAGE))
    pixels = pa.FixedSizeListArray.from_arrays(
        pa.array(rng.integers(0, 256, images * width, np.uint8)), width
    )
    table = pa.table({"image": pixels, "y": rng.integers(0, CLASSES, images)})
    manifest = _write(folder / "image", table)
    yield Case("images, convnet", manifest, 128 if device.type == "cuda" else 4, convnet(device))


def _write(folder: Path, table: pa.Table) -> DatasetManifest:
    folder.mkdir()
    group = max(ROW_GROUP_BYTES * len(table) // table.nbytes, 1)
    parquet.write_table(table, folder / "part-0.parquet", row_group_size=group)
    return read_manifest(LocalStore(str(folder)), str(folder), None, table.column_names)


def mlp(spec: TensorSpec, width: int, device: torch.device) -> Step:
    """Return a step of a network of width-256-256-1, with Adam."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(width, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 1),
    ).to(device)
    optimizer = torch.optim.Adam(layers.parameters())

    def step(columns: Mapping[str, torch.Tensor]) -> int:
        batch = spec.batch(columns, device)
        inputs = batch.inputs[0] if len(batch.inputs) == 1 else torch.stack(batch.inputs, dim=1)
        loss = torch.nn.functional.mse_loss(layers(inputs).squeeze(1), batch.labels[0])
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


def convnet(device: torch.device) -> Step:
    """Return a step of a network about the size of ResNet-18, in bfloat16, with momentum."""
    widths = (64, 128, 256, 512) if device.type == "cuda" else (4, 4, 4, 4)
    blocks = [
        Block(a, b, stride)
        for a, b, stride in zip((widths[0], *widths), widths, (1, 2, 2, 2), strict=False)
    ]
    blocks = [
        part for block, b in zip(blocks, widths, strict=True) for part in (block, Block(b, b, 1))
    ]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
        torch.nn.BatchNorm2d(widths[0]),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
        *blocks,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(widths[-1], CLASSES),
    ).to(device, memory_format=torch.channels_last)
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


def measure(case: Case, device: torch.device, workers: int, repeats: int) -> dict[str, Any]:
    """Time all contenders in turns; show and return the best of each."""
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(contextlib.closing(batches(stack, case, workers, "cpu")))
        plain = stack.enter_context(contextlib.closing(batches(stack, case, workers, "cpu")))
        beside = stack.enter_context(contextlib.closing(batches(stack, case, workers, device)))
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
        best = dict.fromkeys(contenders, 0.0)
        for turn in range(repeats + 1):
            for name, contender in contenders.items():
                speed = contender()
                best[name] = max(best[name], speed if turn else 0.0)
    model, loader, *_ = best.values()
    # Copies cost nothing if this is 1: the slower of model and loader limits the rate.
    table = [
        (name, speed, speed / model, speed / min(model, loader)) for name, speed in best.items()
    ]
    header = ("contender", "rows/s", "of the model alone", "of the slower alone")
    show_table(f"{case.name}, batches of {case.batch_size}, {case.rows} rows", header, table)
    return {
        name: {"rows_per_second": speed, "of_model": of_model, "of_slower": of_slower}
        for name, speed, of_model, of_slower in table
    }


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
