"""Fit whose rows take a chosen time to write; run by test_ended_while_writing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pyspark.sql import SparkSession, functions

from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import TorchEstimator

SLOW, WRITING = "slow", "writing"
"""Files of the folder: whether the last rows are to wait, and whether they do."""

ROWS = 240


def fit(spark: Any, folder: Path, run_id: str) -> Any:
    # In the second of two consecutive partitions: the first is written by then.
    @functions.udf("float")
    def waiting(number: int) -> float:
        while number == ROWS - 1 and (folder / SLOW).exists():
            (folder / WRITING).touch()
            time.sleep(0.05)
        return float(number % 7)

    frame = spark.range(0, ROWS, 1, 2).select(waiting("id").alias("x"))
    frame = frame.withColumn("y", functions.col("x") * 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))
    return TorchEstimator(
        store=Store.create(str(folder / "store")),
        run_id=run_id,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=16,
        epochs=1,
        random_seed=3,
        dry_run=False,
        shuffle_on_write=False,
        backend=LocalBackend(1),
        verbose=0,
    ).fit(frame)


def main(folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    fit(spark, folder, "asked")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
