"""Last batches of one row: batch normalization, and networks that squeeze."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fewer_ranks import FourShards
from rank_pool import shared_ranks
from reference import WIDTH, assert_same_weights, write_rows

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration


class FourShardsEstimator(FourShards, TorchEstimator):
    pass


def normalized() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
    )


def train_parts(columns: Any, steps: list[list[slice]], epochs: int) -> torch.nn.Module:
    """Train in one process that normalizes each part of a step by itself, as ranks do."""
    net = normalized()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = (torch.from_numpy(columns[name]) for name in ("features", "label"))
    for parts in steps * epochs:
        outputs = torch.cat([net(x[part]).reshape(-1) for part in parts])
        optimizer.zero_grad()
        ((outputs - torch.cat([y[part] for part in parts])) ** 2).mean().backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("kind", [TorchEstimator, FourShardsEstimator])
@pytest.mark.parametrize("dry_run", [True, False])
def test_batch_normalization_gets_two_rows_on_each_rank(
    store: Any, kind: type[TorchEstimator], dry_run: bool
) -> None:
    shards = 4 if kind is FourShardsEstimator else 2
    columns = write_rows(Path(store.get_train_data_path()), 17 * shards)
    net = normalized()
    model = kind(
        backend=shared_ranks(2),
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=16,
        epochs=2,
        shuffle=False,
        scale_learning_rate=False,
        dry_run=dry_run,
        verbose=0,
    ).fit_on_parquet()
    starts = [17 * shard for shard in range(shards)]
    steps = [[slice(s, s + 15) for s in starts], [slice(s + 15, s + 17) for s in starts]]
    assert_same_weights(model.getModel(), train_parts(columns, steps, 2))
