"""Predict on streams, in applications that are killed and in a long-running one.

Run by test_long_streams.py. ``write FOLDER`` predicts on all files of a folder, one per
micro-batch, and writes Parquet files. It may be killed and run again. ``memory FOLDER BATCHES``
checks that the memory and the number of files do not grow.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from hvd_estimators.lightning import LightningModel
from hvd_estimators.torch import TorchModel

ROWS = 20
SCHEMA = "id long, x array<double>"
COMMON: dict[str, Any] = {"feature_columns": ["x"], "label_columns": ["y"]}
MOST_GROWTH = 40 * 2**20


def write_source(spark: SparkSession, folder: Path, files: int) -> None:
    """Write files of rows, with consecutive IDs from 0 over all files."""
    for number in range(files):
        ids = spark.range(number * ROWS, (number + 1) * ROWS, 1, 1)
        rows = ids.select("id", F.array(F.col("id").cast("double"), F.lit(1.0)).alias("x"))
        rows.write.mode("append").parquet(str(folder / "source"))


def read(spark: SparkSession, folder: Path) -> Any:
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    return stream.parquet(str(folder / "source"))


class Sum(torch.nn.Module):
    """Sum of each row, with an unneeded table of 2 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(2**19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + self.table[0]


def write(spark: SparkSession, folder: Path) -> None:
    """Predict on new files with the saved model; save a model first if none exists."""
    saved = folder / "model"
    if not saved.exists():
        model = TorchModel(model=Sum(), input_shapes=[[-1, 2]], output_shapes=[[]], **COMMON)
        model.write().save(str(saved))
        write_source(spark, folder, 12)
    predicted = TorchModel.load(str(saved)).transform(read(spark, folder))
    writer = predicted.select("id", "y__output").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.option("path", str(folder / "out")).trigger(availableNow=True).start()
    query.awaitTermination()
    found = spark.read.parquet(str(folder / "out")).collect()
    assert sorted(map(tuple, found)) == [(n, n + 1.0) for n in range(12 * ROWS)]
    print("all well", flush=True)


def resident_in_workers() -> int:
    """Return the resident bytes of this application's Python workers."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        # Some workers end meanwhile.
        with contextlib.suppress(psutil.Error):
            if "pyspark.daemon" in " ".join(process.cmdline()):
                total += process.memory_info().rss
    return total


def memory(spark: SparkSession, folder: Path, batches: int) -> None:
    """Predict in many micro-batches of one application, by one plan and by a plan for each."""
    write_source(spark, folder, batches)
    stream, seen = read(spark, folder), []
    model = LightningModel(model=Sum(), input_shapes=[[-1, 2]], **COMMON)
    driver = psutil.Process()

    def look() -> None:
        spark._jvm.System.gc()  # type: ignore[union-attr]
        runtime = spark._jvm.java.lang.Runtime.getRuntime()  # type: ignore[union-attr]
        heap = runtime.totalMemory() - runtime.freeMemory()
        files = [path for path in Path(spark.sparkContext._temp_dir).iterdir() if path.is_file()]
        seen.append([driver.memory_info().rss, resident_in_workers(), heap, len(files)])
        print(seen[-1], flush=True)

    def planned_anew(batch: Any, number: int) -> None:
        rows = model.transform(batch).collect()
        assert all(row["y__output"] == row["id"] + 1 for row in rows)
        if number % (batches // 4) == batches // 4 - 1:
            look()

    writer = stream.writeStream.foreachBatch(planned_anew).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "by_plans")).start().awaitTermination()
    first, last = np.array(seen[0]), np.array(seen[-1])
    assert (last - first <= [MOST_GROWTH] * 3 + [0]).all(), seen

    seen.clear()
    predicted = model.transform(stream).writeStream.format("noop").trigger(availableNow=True)
    query = predicted.option("checkpointLocation", str(folder / "by_one")).start()
    looked_at = 0
    while not query.awaitTermination(0.2):
        done = (query.lastProgress or {"batchId": 0})["batchId"]
        if done >= looked_at + batches // 4:
            looked_at = done
            look()
    assert len(seen) >= 3
    first, last = np.array(seen[0]), np.array(seen[-1])
    assert (last - first <= [MOST_GROWTH] * 3 + [0]).all(), seen


def main(job: str, folder: Path, *arguments: str) -> None:
    """Run a job in a new session."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    started = time.monotonic()
    jobs: dict[str, Any] = {"write": write, "memory": memory}
    jobs[job](spark, folder, *map(int, arguments))
    print(f"all well in {time.monotonic() - started:.0f} s")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
