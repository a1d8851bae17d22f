"""State of several shards on one rank."""

from __future__ import annotations

from typing import Any

import torch

from hvd_estimators.torch.collectives import session
from hvd_estimators.torch.shard_state import BufferReducer, BufferState
from hvd_estimators.training.shard_state import ShardStates


class Counted(torch.nn.Module):
    """Module with buffers of several types, which each shard changes differently."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)
        for name in ("most", "least", "total", "mean", "first", "other"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("rows", torch.tensor(2**53, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))

    def step(self, shard: int) -> None:
        value = torch.tensor([shard + 1.0, -shard - 1.0])
        self.most.copy_(torch.maximum(self.most, value))
        self.least.copy_(torch.minimum(self.least, value))
        for buffer in (self.mean, self.first, self.other, self.exact):
            buffer.copy_(value)
        self.total += value
        self.rows += shard + 1
        self.seen[shard] = True
        self.phase += complex(shard, 1)
        self.norm.running_mean.fill_(shard)


def test_named_buffers_are_reduced_over_the_shards_of_a_rank() -> None:
    rules = {"most": "max", "least": "min", "total": "sum", "mean": "mean", "first": "rank0"}
    rules |= {"exact": "mean", "rows": "sum", "seen": "max", "phase": "sum", "running_mean": "max"}
    module = Counted()
    states = ShardStates(3, 0, 1, (BufferState(module),))
    states.for_each(lambda _: None)
    reducer = BufferReducer(module, states, rules)
    reducer.start()
    for epoch in (1, 2):
        for turn in range(3):
            states.enter(turn)
            module.step(turn)
        # Resume within the epoch, with the bases of sums from a checkpoint.
        bases = reducer.bases
        reducer = BufferReducer(module, states, rules)
        reducer.start(bases)
        with session("torch"):
            reducer.reduce()
        found: list[Any] = []
        states.for_each(
            lambda _, found=found: found.append(
                {name: buffer.tolist() for name, buffer in module.named_buffers()}
            )
        )
        others = [shard.pop("other") for shard in found]
        assert others == [[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]]
        assert found[0] == found[1] == found[2]
        assert found[0] == {
            "norm.running_mean": [2.0],
            "norm.running_var": [1.0],
            "norm.num_batches_tracked": 0,
            "most": [3.0, 0.0],
            "least": [0.0, -3.0],
            "total": [6.0 * epoch, -6.0 * epoch],
            "mean": [2.0, -2.0],
            "exact": [2.0, -2.0],
            "first": [1.0, -1.0],
            "rows": 2**53 + 6 * epoch,
            "seen": [True] * 3,
            "phase": [complex(3, 3) * epoch],
        }
