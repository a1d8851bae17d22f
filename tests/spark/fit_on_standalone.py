"""Driver of `test_standalone_master`: a fit of 20 s on two ranks of a standalone cluster.

Arguments: the master's URL, the store's folder and ``max_restarts``.
"""

from __future__ import annotations

import logging
import sys
import time

import torch
from pyspark.sql import SparkSession

from hvd_estimators.torch import TorchEstimator


class Slow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(1)
        return self.line(features.float().reshape(-1, 1) / 100)


def main(master: str, store: str, max_restarts: int) -> None:
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    spark = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    frame = spark.range(64).selectExpr("double(id) x", "double(2 * id) y")
    estimator = TorchEstimator(
        model=Slow(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        num_proc=2,
        batch_size=8,
        epochs=5,
        store=store,
        run_id="run",
        max_restarts=max_restarts,
    )
    try:
        summary = estimator.fit(frame).summary
        outcome = f"{summary.totalIterations} epochs, {summary.restarts} restarts"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(f"THE FIT: {outcome}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
