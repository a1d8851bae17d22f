"""A rank that plays several shards is each of them in turn."""

from __future__ import annotations

import random
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvd_estimators.torch.randomness import TorchStreams
from hvd_estimators.torch.shards import BufferState, average_shards
from hvd_estimators.training.rank import seed_rank
from hvd_estimators.training.shards import ShardStates

SHARDS, STEPS, EPOCHS = 5, 3, 2


def play(size: int) -> tuple[dict[int, list[Any]], dict[int, list[int]]]:
    """Return what each shard draws, and how far it counts, played by so many ranks."""
    drawn: dict[int, list[Any]] = {shard: [] for shard in range(SHARDS)}
    counted: dict[int, list[int]] = {shard: [] for shard in range(SHARDS)}
    for rank in range(size):
        module = torch.nn.Module()
        module.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        parts = (TorchStreams(torch.device("cpu")), BufferState(module))
        states = ShardStates(SHARDS, rank, size, parts)
        for epoch in range(EPOCHS):
            states.for_each(
                lambda shard, epoch=epoch: torch.manual_seed(seed_rank(7, shard, epoch))
            )
            for batch in range(STEPS * states.passes):
                turn = batch % states.passes
                states.enter(turn)
                module.count += 1
                numbers = (random.random(), float(np.random.rand()), float(torch.rand(())))
                if turn < len(states.shards):
                    drawn[states.shards[turn]].append(numbers)
            states.for_each(lambda shard, count=module.count: counted[shard].append(int(count)))
    return drawn, counted


def test_each_shard_draws_and_counts_as_on_a_rank_of_its_own() -> None:
    drawn, counted = play(SHARDS)
    assert len({number for shard in drawn.values() for entry in shard for number in entry}) == 90
    assert list(counted.values()) == [[STEPS, EPOCHS * STEPS]] * SHARDS
    for size in (4, 3, 2, 1):
        assert play(size) == (drawn, counted)


def test_statistics_are_averaged_over_the_shards_of_a_rank() -> None:
    hvd.init()
    layer = torch.nn.BatchNorm1d(1)
    states = ShardStates(3, 0, 1, (BufferState(layer),))
    states.for_each(lambda _: None)
    rows = [torch.randn(4 + turn, 1) * turn for turn in range(3)]
    for turn, batch in enumerate(rows):
        states.enter(turn)
        layer(batch)
    average_shards(layer, states)
    # By default a tenth of what is new.
    means = [0.1 * float(batch.mean()) for batch in rows]
    variances = [0.9 + 0.1 * float(batch.var()) for batch in rows]
    found: list[Any] = []
    states.for_each(lambda _: found.append((float(layer.running_mean), float(layer.running_var))))
    expected = (np.mean(means), np.mean(variances))
    assert found == [pytest.approx(expected, rel=1e-5)] * 3
    assert int(layer.num_batches_tracked) == 1
