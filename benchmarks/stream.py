"""Time the micro-batches of a stream with `transform`, against a hand-written UDF."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import psutil
import torch
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.functions import pandas_udf

from benchmarks.common import WIDTH, Net, spark_session
from benchmarks.figures import compared, parser, show_result, show_table
from hvd_estimators.torch import TorchModel

WARM_UP_BATCHES = 10
MEBIBYTE = 2**20


def write_batches(spark: SparkSession, folder: str, batches: int, rows: int) -> None:
    """Write a file of rows with a vector of 8 for each micro-batch."""
    columns = (F.randn(index).alias(f"x{index}") for index in range(WIDTH))
    frame = spark.range(0, batches * rows, 1, batches).select("id", *columns)
    vector = array_to_vector(F.array(*(f"x{index}" for index in range(WIDTH))))
    frame.select("id", vector.alias("features")).write.parquet(folder)


def by_hand(net: torch.nn.Module) -> Callable[[DataFrame], DataFrame]:
    """Return a transformation that adds the network's output with an iterator pandas UDF."""

    @pandas_udf(T.DoubleType())  # type: ignore[call-overload]
    def predict(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        with torch.inference_mode():
            for batch in batches:
                output = net(torch.from_numpy(np.stack(batch.to_list())))
                yield pd.Series(output.reshape(-1).double().numpy())

    def transform(frame: DataFrame) -> DataFrame:
        features = F.unwrap_udt("features")["values"].cast("array<float>")
        return frame.withColumn("label__output", predict(features))

    return transform


def memory() -> dict[str, float]:
    """Return the memory of the driver's Python, its JVM and Spark's Python workers, in MiB."""
    driver = psutil.Process()
    sizes = {"driver": driver.memory_info().rss, "JVM": 0, "workers": 0}
    for process in driver.children(recursive=True):
        try:
            name, rss = " ".join(process.cmdline()), process.memory_info().rss
        except psutil.Error:  # The process has just ended.
            continue
        if "pyspark.daemon" in name:
            sizes["workers"] += rss
        elif "java" in name:
            sizes["JVM"] += rss
    return {name: size / MEBIBYTE for name, size in sizes.items()}


def run(
    frame: DataFrame, transform: Callable[[DataFrame], DataFrame], look: int = 0
) -> tuple[list[float], list[dict[str, float]]]:
    """Run a stream to its end; return the milliseconds of each micro-batch, and memory samples.

    Parameters
    ----------
    frame : DataFrame
        The stream.
    transform : callable
        Predicts on it.
    look : int
        Number of micro-batches between two memory samples; 0 for no samples.
    """
    seen: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        writer = transform(frame).writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", folder).start()
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                last = query.lastProgress
                if look and last and last["batchId"] >= (len(seen) + 1) * look - 1:
                    seen.append(memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        query.awaitTermination()
        ended.set()
        watcher.join()
        progress = query.recentProgress
    return [entry["durationMs"]["addBatch"] for entry in progress if entry["numInputRows"]], seen


def main() -> None:
    options_parser = parser(__doc__, rows=200_000, repeats=2)
    options_parser.add_argument("--cores", type=int, default=2, help="task slots")
    options_parser.add_argument("--batches", type=int, default=200, help="micro-batches")
    options = options_parser.parse_args()
    net = Net().eval()
    ours = TorchModel(
        model=net,
        feature_columns=["features"],
        label_columns=["label"],
        input_shapes=[[-1, WIDTH]],
    )
    transforms = {"hvd_estimators": ours.transform, "by hand": by_hand(net)}
    times: dict[str, list[float]] = {name: [] for name in transforms}
    seen: dict[str, list[list[dict[str, float]]]] = {name: [] for name in transforms}
    with spark_session(options.cores) as spark, tempfile.TemporaryDirectory() as folder:
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(options.batches + 10))

        def stream(name: str, batches: int) -> Any:
            rows = max(options.rows // options.batches, 1)
            write_batches(spark, f"{folder}/{name}", batches, rows)
            reader = spark.readStream.schema(spark.read.parquet(f"{folder}/{name}").schema)
            return reader.option("maxFilesPerTrigger", 1).parquet(f"{folder}/{name}")

        warm_up, measured = stream("warm up", WARM_UP_BATCHES), stream("rows", options.batches)
        for transform in transforms.values():
            run(warm_up, transform)
        for turn in range(options.repeats):
            # The order alternates, because the first contender makes the JVM compile more of Spark.
            for name, transform in [*transforms.items()][:: -1 if turn % 2 else 1]:
                spent, looked = run(measured, transform, options.batches // 4)
                times[name] += spent
                seen[name].append(looked)
    figures = {
        name: {
            "median_ms": float(np.median(spent)),
            "p95_ms": float(np.percentile(spent, 95)),
            "batches": len(spent),
            "memory_mib": seen[name],
            "growth_mib": {
                part: max(looked[-1][part] - looked[0][part] for looked in seen[name])
                for part in memory()
            },
        }
        for name, spent in times.items()
    }
    show_table(
        f"{options.rows} rows in {options.batches} micro-batches, {options.cores} task slots",
        ["", "median ms", "95 % ms", "driver MiB", "workers MiB"],
        [
            [name, f["median_ms"], f["p95_ms"], f["growth_mib"]["driver"], growth["workers"]]
            for name, f in figures.items()
            for growth in [f["growth_mib"]]
        ],
    )
    over = figures["hvd_estimators"]["median_ms"] / figures["by hand"]["median_ms"]
    print(
        f"\na micro-batch takes {over:.2f} times what it takes with the UDF written by hand; of "
        "memory, the table has what is added from the first quarter to the last"
    )
    records = compared("a micro-batch", times, "ms", "by hand", middle=True)
    growth = {
        f"{name}, {part}": [found["growth_mib"][part]]
        for name, found in figures.items()
        for part in found["growth_mib"]
    }
    records += compared("memory added from the first quarter to the last", growth, "MiB")
    show_result("stream", vars(options), {"results": figures, "over_by_hand": over}, records)


if __name__ == "__main__":
    main()
