"""Train a small network on two ranks and predict. The argument is the store: a URL or a folder.

Every recipe runs this program. It prints one line of JSON: the machine and the folder of the
package for the driver and each rank, and predictions for three rows.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import hvd_estimators
from hvd_estimators.torch import TorchEstimator


def place() -> list[str]:
    """Return the machine, and the folder of the package there."""
    import platform

    import hvd_estimators

    return [platform.node(), hvd_estimators.__path__[0]]


def main(store: str) -> None:
    spark = SparkSession.builder.appName("train").getOrCreate()
    x = (F.col("id") / 256).alias("x")
    rows = spark.range(256).select(x, (x * x).alias("y"))

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Flatten(0))
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    estimator = TorchEstimator(
        num_proc=2,
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=128,  # per rank: both ranks together take all rows in each step
        epochs=30,
        scale_learning_rate=False,
        verbose=0,
    )
    model = estimator.fit(rows)
    some = model.transform(rows.where("id % 100 = 0")).orderBy("x").collect()
    print(
        json.dumps(
            {
                "driver": place(),
                "ranks": hvd_estimators.run(place, num_proc=2),
                "predictions": [[row["x"], float(row["y__output"])] for row in some],
            }
        )
    )
    # Databricks ends its own sessions.
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
