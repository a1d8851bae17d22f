"""Per-shard torch state in a checkpoint, with threads instead of ranks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from hvd_estimators.torch import shard_state
from hvd_estimators.torch.collectives import session
from hvd_estimators.torch.serialization import load_state, save_state
from hvd_estimators.torch.shard_state import BufferState, ShardBuffers, non_persistent_buffers
from hvd_estimators.torch.tensors import snapshot
from hvd_estimators.training.shard_state import ShardStates


class Threads:
    """All-gather between threads."""

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
    """Module with buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("table", torch.arange(3).bfloat16())
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.register_buffer("none", None)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_per_shard_buffers_are_restored(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    threads = Threads(size)
    monkeypatch.setattr(shard_state, "exchange", threads)
    num_shards = 3

    def unequal(net: Net, shards: ShardStates) -> Any:
        own = ShardBuffers(net, shards)
        return own.unequal(threads.gather(own.digests, "digests"))

    def as_rank(rank: int) -> tuple[Any, Any]:
        net = Net()
        shards = ShardStates(num_shards, rank, size, (BufferState(net),))

        def train(shard: int) -> None:
            net.norm.running_mean += shard
            net.passing += shard
            net.norm.num_batches_tracked += 1

        # As at the start of an epoch.
        shards.for_each(lambda shard: None)
        shards.for_each(train)
        found = unequal(net, shards)
        of_step = ShardBuffers(net, shards, non_persistent_buffers(Net()))
        with_fleeting = of_step.unequal(threads.gather(of_step.digests, "digests"))
        assert [buffers["passing"].tolist() for buffers in with_fleeting] == [
            [0, 0],
            [1, 1],
            [2, 2],
        ]
        assert "constant" not in with_fleeting[0]
        again = Net()
        resumed = ShardStates(num_shards, rank, size, (BufferState(again),))
        resumed.for_each(lambda shard: BufferState(again).restore(found[shard]))
        restored = {}
        resumed.for_each(lambda shard: restored.update({shard: again.norm.running_mean.tolist()}))
        return found, restored

    for found, restored in threads.run(as_rank):
        # Neither buffers that all shards share nor non-persistent buffers.
        assert [list(buffers) for buffers in found] == [["norm.running_mean"]] * num_shards
        assert all(mean == [shard, shard] for shard, mean in restored.items())
    equal = threads.run(lambda rank: unequal(Net(), ShardStates(num_shards, rank, size)))
    assert equal == [[{}] * num_shards] * size


def test_snapshots_of_tensors_of_several_parts_are_separate() -> None:
    with session("torch"):
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parts = [DTensor.from_local(torch.full((2,), value), mesh) for value in (1.0, 2.0)]
        assert [part.data_ptr() for part in parts] == [0, 0]
        made = snapshot({"first": parts[0], "second": parts[1]})
        assert [value.to_local().tolist() for value in made.values()] == [[1.0] * 2, [2.0] * 2]


def test_snapshots_do_not_change_and_hold_shared_tensors_once() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    net = torch.nn.Sequential(first, second, torch.nn.BatchNorm1d(2))
    given = {
        "model": net.state_dict(),
        "list": [(torch.ones(2), 1.5), torch.zeros(0), torch.zeros(0)],
        "sparse": torch.eye(2).to_sparse(),
    }
    made = snapshot(given)
    expected = [value.clone() for value in made["model"].values()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 1
    assert [v.tolist() for v in made["model"].values()] == [v.tolist() for v in expected]
    assert made["model"]["0.weight"] is made["model"]["1.weight"]
    assert made["model"]._metadata == given["model"]._metadata
    file = io.BytesIO()
    save_state(made, file)
    file.seek(0)
    loaded = load_state(file)
    assert loaded["list"][0][1] == 1.5
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2))
