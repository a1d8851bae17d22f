"""Hand-written training: with Horovod, and with Spark's `TorchDistributor`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import horovod.torch as hvd
import numpy as np
import torch
from pyspark import cloudpickle as of_pyspark
from pyspark.ml.functions import vector_to_array
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import DataFrame

from benchmarks.common import WIDTH, Arrays, Net, squared_error

State = dict[str, Any]
"""Weights of `Net`, which rank 0 returns."""


def save(folder: Path, split: str, rows: Arrays) -> None:
    """Write the arrays that `train` reads."""
    np.save(folder / f"{split}_features.npy", rows.features)
    np.save(folder / f"{split}_labels.npy", rows.labels)


def train(folder: Path, epochs: int, batch_size: int, learning_rate: float, seed: int) -> State:
    """Train `Net` with Horovod on saved arrays; validate after each epoch. Runs on every rank."""
    hvd.init()
    torch.manual_seed(seed + hvd.rank())
    model = Net()
    features, labels = _share(folder, "train")
    val_features, val_labels = _share(folder, "validation")
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(epochs):
        _train_epoch(model, optimizer, features, labels, batch_size)
        with torch.no_grad():
            hvd.allreduce(squared_error(model(val_features), val_labels), name="validation")
    hvd.shutdown()
    return model.state_dict()


def _train_epoch(
    model: torch.nn.Module, optimizer: Any, features: Any, labels: Any, batch_size: int
) -> None:
    """Train on each row once, in random order; leave the model ready for validation."""
    model.train()
    for rows in torch.randperm(len(features)).split(batch_size):
        optimizer.zero_grad()
        squared_error(model(features[rows]), labels[rows]).backward()
        optimizer.step()
    model.eval()


def _share(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the rows; all ranks have the same number."""
    features = np.load(folder / f"{split}_features.npy", mmap_mode="r")
    labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r")
    rows = len(features) // hvd.size() * hvd.size()
    mine = slice(hvd.rank(), rows, hvd.size())
    return torch.from_numpy(features[mine].copy()), torch.from_numpy(labels[mine].copy())


def distribute(
    frame: DataFrame, folder: Path, ranks: int, settings: tuple[int, int, float, int]
) -> State:
    """Train with `TorchDistributor`: write Parquet with Spark, and read and train in its processes.

    The settings are epochs, rows of a batch, learning rate, and seed.
    """
    features = vector_to_array("features", "float32").alias("features")
    written = frame.select(features, "label", "is_validation").write
    written.partitionBy("is_validation").parquet(f"file://{folder}/rows")
    return torch_distributor(ranks).run(train_from_parquet, str(folder), *settings)


def torch_distributor(ranks: int) -> TorchDistributor:
    """Return a distributor whose processes are Spark tasks."""
    return TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)


@contextlib.contextmanager
def sent_by_value() -> Iterator[None]:
    """Send functions and networks of these benchmarks in full, as a script's are sent.

    The processes import only what a function uses: not Spark, and not this package, which
    `TorchDistributor`'s cannot import. PySpark's copy of cloudpickle has its own registry.
    """
    names, picklers = ("benchmarks.train_by_hand", "benchmarks.common"), (cloudpickle, of_pyspark)
    chosen = [(pickler, sys.modules[name]) for name in names for pickler in picklers]
    for pickler, module in chosen:
        pickler.register_pickle_by_value(module)
    try:
        yield
    finally:
        for pickler, module in chosen:
            pickler.unregister_pickle_by_value(module)


def train_from_parquet(
    folder: str, epochs: int, batch_size: int, learning_rate: float, seed: int
) -> State:
    """Train `Net` with ``DistributedDataParallel``; validate each epoch. Runs on every rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)
    features, labels = _read_share(f"{folder}/rows/is_validation=false", rank, ranks)
    val_features, val_labels = _read_share(f"{folder}/rows/is_validation=true", rank, ranks)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * ranks)
    for _ in range(epochs):
        _train_epoch(model, optimizer, features, labels, batch_size)
        with torch.no_grad():
            loss = squared_error(model.module(val_features), val_labels)
        dist.all_reduce(loss)
    dist.destroy_process_group()
    # The group's thread needs the GIL to release its last tensor. Deleting the model, below, waits
    # for that thread while holding the GIL; with torch 2.13 this is a deadlock.
    time.sleep(0.1)
    return model.module.state_dict()


def _read_share(folder: str, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the rows of Parquet files; all ranks have the same number."""
    from pyarrow import dataset

    table = dataset.dataset(folder, format="parquet").to_table(columns=["features", "label"])
    rows = table.num_rows // ranks * ranks
    features = table["features"].combine_chunks().flatten().to_numpy().reshape(-1, WIDTH)
    labels = table["label"].to_numpy().astype(np.float32).reshape(-1, 1)
    mine = slice(rank, rows, ranks)
    return torch.from_numpy(features[mine].copy()), torch.from_numpy(labels[mine].copy())
