"""Training functions and a fit that a driver runs on every kind of cluster."""

from __future__ import annotations

import os
from typing import Any

ROWS, STEPS, RATE = 8, 5, 0.01
"""Rows ``(x, 2 x + 1)`` for ``x`` from 0, which ranks take in turns; and steps of descent."""


def place(hvd: Any) -> dict[str, Any]:
    """Return this rank's numbers, host, working folder and devices."""
    import socket

    import hvd_estimators

    return {
        "rank": (hvd.rank(), hvd.size()),
        "local": (hvd.local_rank(), hvd.local_size()),
        "cross": (hvd.cross_rank(), hvd.cross_size()),
        "host": socket.gethostname(),
        # Each executor has a different folder.
        "folder": os.getcwd(),
        "container": os.environ.get("CONTAINER_ID"),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": hvd_estimators.get_available_devices(),
    }


def train_torch() -> tuple[dict[str, Any], list[float]]:
    """Fit a line to this rank's rows, like a user's function; return its place and the line."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    x = torch.arange(ROWS, dtype=torch.float64)[hvd.rank() :: hvd.size(), None]
    net = torch.nn.Linear(1, 1).double()
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, hvd.rank())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=RATE), named_parameters=net.named_parameters()
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), 2 * x + 1).backward()
        optimizer.step()
    return place(hvd), [float(net.weight), float(net.bias)]


def run(train: Any, num_proc: int) -> list[Any]:
    import hvd_estimators

    return hvd_estimators.run(train, num_proc=num_proc)


def fit(url: str) -> list[float]:
    """Fit a line to the same rows by an estimator, one batch per epoch, and return the line."""
    import torch
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from hvd_estimators import Store
    from hvd_estimators.torch import TorchEstimator

    frame = (
        SparkSession.active()
        .range(ROWS)
        .select(F.col("id").cast("double").alias("x"), (2.0 * F.col("id") + 1).alias("y"))
    )
    net = torch.nn.Linear(1, 1)
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)
    estimator = TorchEstimator(
        num_proc=2,
        store=Store.create(url),
        model=net,
        # The rate of one rank; the estimator multiplies it by the number of ranks.
        optimizer=torch.optim.SGD(net.parameters(), lr=RATE / 2),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        batch_size=ROWS // 2,
        epochs=STEPS,
        verbose=0,
    )
    trained = estimator.fit(frame).getModel()
    return [float(trained.weight), float(trained.bias)]
