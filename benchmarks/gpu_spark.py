"""Training and `transform` on a GPU that Spark assigns, compared with the CPU.

Needs torch with CUDA and PySpark with Java, but not TensorFlow or Petastorm. It also needs Horovod
unless ``--without-fit`` is set. Spark assigns the GPU as in a cluster: ``local-cluster`` and a
discovery script that calls ``nvidia-smi``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

import cloudpickle
import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from benchmarks.by_hand import moved_alone
from benchmarks.figures import parser, seconds, show_result, show_table
from benchmarks.gpu import device_facts
from benchmarks.transform_images import Residual
from benchmarks.transform_times import Transform, consume
from hvd_estimators import Store
from hvd_estimators.torch import TorchModel

OUTPUT = "label__output"
WIDTH = 64
LARGE_IMAGE = (3, 224, 224)
HALF = "bfloat16"
TOLERANCE = 2e-2
"""Tolerance in standard deviations of the outputs; by torch's default, cuDNN convolves in TF32."""

_ASKS = """#!/bin/sh
first=$(nvidia-smi --query-gpu=index --format=csv,noheader | head -1)
echo '{"name": "gpu", "addresses": ["'$first'"]}'
"""
_MADE_UP = """#!/bin/sh
echo '{"name": "gpu", "addresses": ["0"]}'
"""


@dataclass(frozen=True)
class Case:
    """A network and rows for it.

    Attributes
    ----------
    name : str
        Name of the case.
    net : torch.nn.Module
        The network, on the CPU.
    column : Column
        The features: an array of floats, or bytes.
    shape : tuple of int
        Shape of a row.
    rows : int
        Number of rows.
    batch_size : int
        Rows of a forward pass.
    """

    name: str
    net: torch.nn.Module
    column: Any
    shape: tuple[int, ...]
    rows: int
    batch_size: int

    @property
    def is_bytes(self) -> bool:
        return self.shape == LARGE_IMAGE

    def frame(self, spark: SparkSession, partitions: int) -> DataFrame:
        """Return ``id, x``, cached."""
        made = spark.range(0, self.rows, 1, partitions).select("id", self.column.alias("x"))
        frame = made.cache()
        frame.count()
        return frame

    def model(self, precision: str = "float32") -> TorchModel:
        """Return the network as a model that predicts on columns."""
        given: dict[str, Any] = {}
        if self.is_bytes:
            given = {"transformation_batch_fn": decoded, "apply_transformation": True}
        return TorchModel(
            model=self.net,
            feature_columns=["x"],
            label_columns=["label"],
            input_shapes=[[-1, *self.shape]],
            inference_batch_size=self.batch_size,
            inference_precision=precision,
            **given,
        )


def decoded(batch: dict[str, Any]) -> dict[str, Any]:
    """Convert images of bytes to numbers from 0 to 1."""
    pixels = np.frombuffer(b"".join(batch["x"]), np.uint8).reshape(-1, *LARGE_IMAGE)
    return {**batch, "x": pixels.astype(np.float32) / 255}


def cases(rows: int, images: int) -> Iterator[Case]:
    """Build the networks, each with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 1),
        )
        small, large = Residual(), OfLargeImages()
    number = (F.col("id") * 31 + F.lit(7)) % 255 / 255
    vector = F.transform(
        F.array_repeat(number, WIDTH), lambda x, i: F.sin(x * (i + 1)).cast("float")
    )
    yield Case("vector of 64, MLP", mlp, vector, (WIDTH,), rows, 16384)
    pixels = F.transform(
        F.array_repeat(number, 3 * 64 * 64), lambda x, i: (x * ((i * 13) % 17) / 17).cast("float")
    )
    yield Case("images 3x64x64, 14 convolutions", small, pixels, (3, 64, 64), images, 128)
    size = int(np.prod(LARGE_IMAGE))
    repeated = F.expr(
        f"unhex(substr(repeat(sha2(cast(id as string), 256), {size // 32 + 1}), 1, {2 * size}))"
    )
    name = "bytes of 3x224x224, 34 convolutions"
    yield Case(name, large, repeated, LARGE_IMAGE, images // 4, 64)


class OfLargeImages(torch.nn.Module):
    """A network with about as many multiplications as ResNet-50: 4 G an image."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 7, 4, 3)]
        for channels, wider, blocks in ((64, 128, 5), (128, 256, 6), (256, 512, 4)):
            stages += [Added(channels) for _ in range(blocks)]
            stages.append(torch.nn.Conv2d(channels, wider, 3, 2, 1))
        self.stages = torch.nn.Sequential(*stages)
        self.head = torch.nn.Linear(512, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(images).mean((2, 3)))


class Added(torch.nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(channels, channels, 3, 1, 1)
        self.second = torch.nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def main() -> None:
    options_parser = parser(__doc__, rows=2_000_000, repeats=2)
    options_parser.add_argument("--images", type=int, default=20_000, help="rows of images")
    options_parser.add_argument("--slots", type=int, default=min(os.cpu_count() or 1, 8))
    options_parser.add_argument("--cpu", action="store_true", help="try it without a GPU, quickly")
    options_parser.add_argument("--without-fit", action="store_true", help="Horovod is not there")
    options_parser.add_argument("--only", default="", help="cases with this in their names")
    options_parser.add_argument("--fit-alone", action="store_true", help="leave transform out")
    options = options_parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here. Run it where there is one, or with --cpu.")
    device = torch.device("cpu" if options.cpu else "cuda:0")
    figures: dict[str, Any] = {"device": device_facts(device), "fit": {}, "transform": {}}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-gpu-") as folder:
        if not options.without_fit:
            with session(Path(folder), options.slots, 1, options.cpu) as spark:
                figures["fit"] = of_fit(spark, Path(folder), options)
        if not options.fit_alone:
            shown = of_cpu(options, Path(folder))
            with session(Path(folder), options.slots, options.slots, options.cpu) as spark:
                figures["predicts_on"] = predicts_on(spark)
                for case in cases(options.rows, options.images):
                    if options.only not in case.name:
                        continue
                    found = of_transform(spark, case, device, options)
                    found["differs"] = differences(spark, case, shown[case.name])
                    found["on the CPU"] = shown[case.name]["rows_per_second"]
                    figures["transform"][case.name] = found
    settings = {"rows": options.rows, "images": options.images, "slots": options.slots}
    show_result("gpu_spark", settings, figures)


@contextlib.contextmanager
def session(
    folder: Path, slots: int, tasks_per_gpu: int, is_made_up: bool
) -> Iterator[SparkSession]:
    """Yield a session of one executor whose tasks share a GPU; without a GPU if there are none."""
    discovery = folder / "gpus.sh"
    discovery.write_text(_MADE_UP if is_made_up else _ASKS)
    discovery.chmod(0o755)
    builder = (
        SparkSession.builder.master(f"local-cluster[1,{slots},{2048 * slots}]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", f"{2048 * slots}m")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
    )
    if tasks_per_gpu:
        builder = (
            builder.config("spark.worker.resource.gpu.amount", "1")
            .config("spark.worker.resource.gpu.discoveryScript", str(discovery))
            .config("spark.executor.resource.gpu.amount", "1")
            .config("spark.task.resource.gpu.amount", str(1 / tasks_per_gpu))
        )
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    try:
        yield made
    finally:
        made.stop()


FEW = 64


def of_cpu(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Predict some rows on the CPU, in tasks without a GPU; return their outputs and rate."""
    figures = {}
    with session(folder, options.slots, 0, options.cpu) as spark:
        for case in cases(options.rows, options.images):
            if options.only not in case.name:
                continue
            few = min(FEW, case.rows)
            frame = case.frame(spark, options.slots).where(f"id < {few}")
            took = seconds(lambda case=case, frame=frame: consume(case.model().transform(frame)))
            figures[case.name] = {
                "rows_per_second": few / took,
                "outputs": outputs_of(case.model(), frame),
            }
    return figures


class SaysWhere(torch.nn.Module):
    """Return 1 if the module computes on a GPU, otherwise 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x[:, :1], float(x.is_cuda))


def predicts_on(spark: SparkSession) -> list[str]:
    """Return the kinds of devices on which rows are predicted."""
    model = TorchModel(
        model=SaysWhere(), feature_columns=["id"], label_columns=["label"], input_shapes=[[-1, 1]]
    )
    outputs = outputs_of(model, spark.range(0, 1000, 1, 16))
    kinds = sorted({"GPU" if output == 1 else "CPU" for output in outputs[:, 0]})
    print(f"rows are predicted on: {kinds}", flush=True)
    return kinds


def outputs_of(model: TorchModel, frame: DataFrame) -> np.ndarray:
    """Return the outputs by ascending id."""
    rows = model.transform(frame).orderBy("id").select(OUTPUT).collect()
    return np.array([np.atleast_1d(np.asarray(row[0], np.float64)) for row in rows])


def differences(spark: SparkSession, case: Case, shown: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences from the CPU's outputs, in their standard deviation."""
    frame = case.frame(spark, 1).where(f"id < {len(shown['outputs'])}")
    wanted = shown["outputs"]
    spread = float(wanted.std(axis=0).max())
    found = {}
    for precision in ("float32", HALF):
        outputs = outputs_of(case.model(precision), frame)
        found[precision] = float(np.abs(outputs - wanted).max()) / spread
    print(f"{case.name}: largest difference to the CPU, in standard deviations: {found}")
    if found["float32"] > TOLERANCE:
        raise SystemExit(f"{case.name}: the GPU's outputs are others than the CPU's.")
    return found


def of_transform(
    spark: SparkSession, case: Case, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Time the network alone, `transform`, and a hand-written equivalent, in turns."""
    frame = case.frame(spark, 4 * options.slots)
    measured: dict[str, Transform] = {
        "to Python alone": moved_alone,
        "mapInArrow by hand": by_hand(spark, case, device.type),
        "hvd_estimators": case.model().transform,
        f"hvd_estimators, {HALF}": case.model(HALF).transform,
    }
    for transform in measured.values():
        consume(transform(frame.where("id % 97 = 0")))
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(options.repeats):
        for name, transform in measured.items():
            times[name].append(seconds(lambda t=transform: consume(t(frame))))
    rates = {name: case.rows / min(all_seconds) for name, all_seconds in times.items()}
    rates["the network alone, rows on the GPU"] = alone(case, device)
    rates["the network alone, from the CPU"] = alone(case, device, is_there=False)
    bound = min(rates["to Python alone"], rates["the network alone, rows on the GPU"])
    show_table(
        f"{case.name}: {case.rows} rows, {options.slots} tasks share a GPU",
        ["", "rows/s", "of the slower of Spark and the network"],
        [[name, int(rate), rate / bound] for name, rate in rates.items()],
    )
    frame.unpersist()
    return {**rates, "of_slower": rates["hvd_estimators"] / bound}


def alone(case: Case, device: torch.device, is_there: bool = True) -> float:
    """Return the rows per second of forward passes on one batch, with or without copying it."""
    net = case.net.eval().to(device)
    batch = torch.rand(case.batch_size, *case.shape)
    held = batch.to(device)
    turns = 50 if device.type == "cuda" else 2

    def passes(count: int) -> None:
        with torch.inference_mode():
            for _ in range(count):
                found = net(held if is_there else batch.to(device))
            found.cpu()

    passes(3)
    rate = turns * case.batch_size / seconds(lambda: passes(turns))
    case.net.to("cpu")
    return rate


def by_hand(spark: SparkSession, case: Case, kind: str) -> Callable[[DataFrame], DataFrame]:
    """Return a `mapInArrow` that copies each batch to the device, waits, and copies it back."""
    model = spark.sparkContext.broadcast(cloudpickle.dumps(case.net.eval()))
    shape, is_bytes = case.shape, case.is_bytes
    batch_size = case.batch_size

    def infer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        net = cloudpickle.loads(model.value).to(kind)
        for given in batches:
            for start in range(0, given.num_rows, batch_size):
                batch = given.slice(start, batch_size)
                column = batch.column("x")
                if is_bytes:
                    rows = np.frombuffer(b"".join(column.to_pylist()), np.uint8).reshape(-1, *shape)
                    rows = rows.astype(np.float32) / 255
                else:
                    rows = column.flatten().to_numpy().reshape(-1, *shape)
                with torch.inference_mode():
                    found = net(torch.from_numpy(rows).to(kind)).cpu().numpy().astype(np.float64)
                ends = np.arange(0, found.size + 1, found.shape[1], dtype=np.int32)
                values = pa.ListArray.from_arrays(ends, pa.array(found.reshape(-1)))
                columns = [*batch.columns, values]
                yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, OUTPUT])

    def transform(frame: DataFrame) -> DataFrame:
        field = T.StructField(OUTPUT, T.ArrayType(T.DoubleType()))
        return frame.mapInArrow(infer, T.StructType([*frame.schema.fields, field]))

    return transform


def of_fit(spark: SparkSession, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train on the GPU that Spark assigns and on the CPU, with the same order of rows."""
    from hvd_estimators.torch import TorchEstimator

    rows = min(options.rows, 200_000)
    frame = next(cases(rows, 1)).frame(spark, options.slots)
    frame = frame.withColumn("label", F.col("x")[3] * 2 - F.col("x")[9])
    found: dict[str, Any] = {}
    weights = {}
    for name, use_gpu in (("GPU", not options.cpu), ("CPU", False)):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            net = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )
        seen = folder / f"{name}.txt"

        def loss(output: torch.Tensor, target: torch.Tensor, seen: Path = seen) -> torch.Tensor:
            if "HOROVOD_RANK" in os.environ and not seen.exists():
                gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
                seen.write_text(f"{output.device} of {gpus}")
            return torch.nn.functional.mse_loss(output, target)

        estimator = TorchEstimator(
            model=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
            loss=loss,
            feature_cols=["x"],
            label_cols=["label"],
            input_shapes=[[-1, WIDTH]],
            batch_size=2048,
            epochs=3,
            num_proc=1,
            random_seed=3,
            use_gpu=use_gpu,
            store=Store.create(str(folder / name)),
        )
        started = time.perf_counter()
        fitted = estimator.fit(frame)
        took = time.perf_counter() - started
        parameters = fitted.getModel().parameters()
        weights[name] = torch.cat([weight.detach().reshape(-1) for weight in parameters])
        found[name] = {
            "seconds": took,
            "device": seen.read_text(),
            "losses": [epoch["train"]["loss"] for epoch in fitted.getHistory()],
        }
        print(f"fit, {name}: {found[name]}", flush=True)
    found["differs"] = float((weights["GPU"] - weights["CPU"]).abs().max())
    print(f"fit: weights differ by {found['differs']:.3g} at most", flush=True)
    return found


if __name__ == "__main__":
    main()
