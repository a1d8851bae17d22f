"""Spark session, data and network of the benchmarks that use Spark."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Set before Spark starts, so that its tasks inherit it. Without it, importing `horovod.spark` from
# this package's build of Horovod raises an error.
os.environ["HVD_ESTIMATORS_HOROVOD_SPARK"] = "1"
# Spark's Python workers must use this Python, not the first one in PATH.
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

# Without it, the baseline's ranks crash if they load triton after TensorFlow.
import hvd_estimators  # noqa: F401

WIDTH = 8
HIDDEN = 64
NOISE = 0.1
"""Standard deviation of the labels' noise; a model's validation loss is at least its square."""

VALIDATION_SHARE = 0.1
PARTITIONS = 8


class Net(torch.nn.Module):
    """A network 8-64-1 with the same initial weights every time.

    It casts its input, because `horovod.spark` predicts on doubles.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features.float())


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error; casts the target, which `horovod.spark` may pass as double."""
    return torch.nn.functional.mse_loss(output, target.float())


@dataclass(frozen=True)
class Arrays:
    """Rows as arrays: features of ``(rows, 8)`` and labels of ``(rows, 1)``, both float32."""

    features: np.ndarray
    labels: np.ndarray


@contextlib.contextmanager
def spark_and_folder(cores: int) -> Iterator[tuple[SparkSession, Path]]:
    """Yield a quiet local session with the given number of task slots, and a temporary folder."""
    session = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("hvd_estimators benchmarks")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.shuffle.partitions", str(cores))
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    try:
        with tempfile.TemporaryDirectory(prefix="hvd-estimators-bench-") as folder:
            yield session, Path(folder)
    finally:
        session.stop()


def lists(values: np.ndarray) -> pa.Array:
    """Return the rows of an array as lists of Arrow."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, values.reshape(-1))


def regression_data(spark: SparkSession, rows: int) -> DataFrame:
    """Return ``id, features (vector), label, is_validation``, generated from a seed and cached."""
    # Spark adds the partition's number to a seed, so neighbouring seeds would repeat numbers.
    seeds = [1000 * index for index in range(1, WIDTH + 3)]
    x = [F.col(f"x{index}") for index in range(WIDTH)]
    signal = F.sin(2 * x[0]) + 0.5 * x[1] * x[2] + 0.3 * F.abs(x[3]) - 0.2 * x[4] + 0.1 * x[5]
    frame = (
        spark.range(0, rows, 1, PARTITIONS)
        .select("id", *(F.randn(seeds[i]).alias(f"x{i}") for i in range(WIDTH)))
        .select(
            "id",
            array_to_vector(F.array(*x)).alias("features"),
            (signal + NOISE * F.randn(seeds[WIDTH])).alias("label"),
            (F.rand(seeds[WIDTH + 1]) < VALIDATION_SHARE).alias("is_validation"),
        )
        .cache()
    )
    frame.count()
    return frame


def write_regression_data(folder: Path, target: Path, rows: int) -> None:
    """Write rows as NumPy arrays into one folder, and as Parquet into another; without Spark."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    label = (np.sin(2 * features[:, 0]) + NOISE * rng.normal(size=rows)).astype(np.float32)
    np.save(folder / "features.npy", features)
    np.save(folder / "label.npy", label)
    target.mkdir(parents=True)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), WIDTH)
    table = pa.table({"features": vectors, "label": label})
    parquet.write_table(table, target / "part-0.parquet", row_group_size=50_000)


def collect(frame: DataFrame) -> Arrays:
    """Collect a DataFrame of features and labels on the driver."""
    table = frame.select(vector_to_array("features", "float32").alias("x"), "label").toPandas()
    return Arrays(
        np.stack(table["x"].tolist()).astype(np.float32),
        table["label"].to_numpy(np.float32).reshape(-1, 1),
    )


def loss_on(model: torch.nn.Module, rows: Arrays) -> float:
    """Return a model's mean squared error over all rows, computed in this process."""
    with torch.inference_mode():
        output = model(torch.from_numpy(rows.features))
    return float(np.mean((output.double().numpy() - rows.labels.astype(np.float64)) ** 2))


def need_baseline() -> None:
    """Exit if `horovod.spark` cannot run."""
    if importlib.util.find_spec("petastorm") is None:
        raise SystemExit(
            "horovod.spark reads with Petastorm, which is not installed here. Run 'make setup' "
            "and use its .venv/bin/python."
        )


def consume(frame: DataFrame) -> None:
    """Compute every row and every column, and discard them."""
    frame.write.format("noop").mode("overwrite").save()
