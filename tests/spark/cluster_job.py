"""Fits on two executor processes with a (pretended) GPU each; run by test_cluster.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from hvd_estimators import Store
from hvd_estimators.exceptions import SlotsError, StoreError
from hvd_estimators.launch.spark import SparkBackend
from hvd_estimators.torch import TorchEstimator


def main(folder: Path) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    discovery = folder / "gpus.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["4", "7"]}\'\n')
    discovery.chmod(0o755)
    spark = (
        SparkSession.builder.master("local-cluster[1,2,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.worker.resource.gpu.amount", "2")
        .config("spark.worker.resource.gpu.discoveryScript", str(discovery))
        .config("spark.executor.resource.gpu.amount", "2")
        .config("spark.task.resource.gpu.amount", "1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")

    def pinned_gpu() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    gpus = SparkBackend(2).run(pinned_gpu)
    assert sorted(gpus) == ["4", "7"], gpus
    use_local_rank = {"HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": "1"}
    assert SparkBackend(2, env=use_local_rank).run(pinned_gpu) == ["0", "1"]

    frame = spark.range(64).select(F.rand(1).alias("x")).withColumn("y", F.col("x") * 2)
    net = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=2,
        store=Store.create(str(folder / "store")),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        epochs=2,
    )
    losses = [record["train"]["loss"] for record in estimator.fit(frame).getHistory()]
    assert losses[1] < losses[0], losses

    # Each process sees a folder of its own here, as machines do that share nothing.
    os.chdir(folder)
    apart = estimator.copy({estimator.store: Store.create("/proc/self/cwd/apart")})
    with pytest.raises(StoreError, match="do not see"):
        apart.fit(frame)
    with pytest.raises(SlotsError, match="has 2"):
        estimator.copy({estimator.num_proc: 5}).fit(frame)
    spark.stop()
    print("all well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
