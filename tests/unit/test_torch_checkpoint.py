"""What torch ranks add to a checkpoint, with threads in the place of ranks."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from hvd_estimators.torch import checkpoint
from hvd_estimators.torch.checkpoint import (
    callback_states,
    load_file,
    restore_callbacks,
    save_file,
    unequal_buffers,
)
from hvd_estimators.torch.shards import BufferState
from hvd_estimators.training.shards import ShardStates


class Threads:
    """An exchange between threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.own = threading.local()
        self.barrier = threading.Barrier(size)
        self.values: dict[str, dict[int, Any]] = {}

    def gather(self, value: Any, name: str) -> list[Any]:
        self.values.setdefault(name, {})[self.own.rank] = value
        self.barrier.wait(30)
        return [self.values[name][rank] for rank in range(self.size)]

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        def as_rank(rank: int) -> Any:
            self.own.rank = rank
            return call(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(as_rank, range(self.size)))


class Net(torch.nn.Module):
    """Has buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(3).bfloat16())
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buffers_that_shards_have_of_their_own_come_back_to_them(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads = Threads(size)
    monkeypatch.setattr(checkpoint, "exchange", threads)
    num_shards = 3

    def as_rank(rank: int) -> tuple[Any, Any]:
        net = Net()
        shards = ShardStates(num_shards, rank, size, (BufferState(net),))

        def train(shard: int) -> None:
            net.norm.running_mean += shard
            net.passing += shard
            net.norm.num_batches_tracked += 1

        # As an epoch begins with seeds.
        shards.for_each(lambda shard: None)
        shards.for_each(train)
        found = unequal_buffers(net, shards)
        again = Net()
        resumed = ShardStates(num_shards, rank, size, (BufferState(again),))
        resumed.for_each(lambda shard: BufferState(again).restore(found[shard]))
        restored = {}
        resumed.for_each(lambda shard: restored.update({shard: again.norm.running_mean.tolist()}))
        return found, restored

    for found, restored in threads.run(as_rank):
        # Not those that are the same for all, nor those that a state does not have.
        assert [list(buffers) for buffers in found] == [["norm.running_mean"]] * num_shards
        assert all(mean == [shard, shard] for shard, mean in restored.items())
    equal = threads.run(lambda rank: unequal_buffers(Net(), ShardStates(num_shards, rank, size)))
    assert equal == [[{}] * num_shards] * size


class Scheduled:
    """A callback that keeps state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_states_of_callbacks_go_by_position_and_others_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = [object(), Scheduled(rate=0.1, best=torch.ones(2)), Scheduled(lock=object())]
    with caplog.at_level(logging.WARNING):
        states = callback_states(given)
    assert caplog.text.count("Scheduled.state_dict() returns holds more than tensors") == 1
    file = io.BytesIO()
    save_file({"callbacks": states}, file)
    file.seek(0)
    fresh = [object(), Scheduled(rate=1.0), Scheduled(rate=2.0)]
    restore_callbacks(fresh, load_file(file)["callbacks"])
    assert fresh[1].state["rate"] == 0.1  # type: ignore[attr-defined]
    assert torch.equal(fresh[1].state["best"], torch.ones(2))  # type: ignore[attr-defined]
    assert fresh[2].state == {"rate": 2.0}  # type: ignore[attr-defined]
