"""The training that one would write by hand with Horovod, on arrays that lie ready on disk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.common import Arrays, Net, squared_error


@dataclass(frozen=True)
class Trained:
    """What rank 0 returns: the weights and the seconds that its loop took."""

    state: dict[str, Any]
    seconds: float


def save(folder: Path, split: str, rows: Arrays) -> None:
    """Write the arrays that `train` reads."""
    np.save(folder / f"{split}_features.npy", rows.features)
    np.save(folder / f"{split}_labels.npy", rows.labels)


def train(folder: Path, epochs: int, batch_size: int, learning_rate: float, seed: int) -> Trained:
    """Train `Net`, validating after each epoch. Runs on every rank."""
    hvd.init()
    torch.manual_seed(seed + hvd.rank())
    model = Net()
    features, labels = _share(folder, "train")
    val_features, val_labels = _share(folder, "validation")
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    started = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(features)).split(batch_size):
            optimizer.zero_grad()
            squared_error(model(features[rows]), labels[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            hvd.allreduce(squared_error(model(val_features), val_labels), name="validation")
    taken = time.perf_counter() - started
    state = model.state_dict()
    hvd.shutdown()
    return Trained(state, taken)


def _share(folder: Path, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the rows; all ranks have the same number."""
    features = np.load(folder / f"{split}_features.npy", mmap_mode="r")
    labels = np.load(folder / f"{split}_labels.npy", mmap_mode="r")
    rows = len(features) // hvd.size() * hvd.size()
    mine = slice(hvd.rank(), rows, hvd.size())
    return torch.from_numpy(features[mine].copy()), torch.from_numpy(labels[mine].copy())
