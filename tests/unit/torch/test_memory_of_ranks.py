"""Memory that is computed before a launch, beside the bytes that torch allocates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from hvd_estimators.__main__ import main
from hvd_estimators.torch.sharding import ShardingOptions, local_part, shard
from hvd_estimators.training.memory import STATES, describe_memory, rank_bytes

OPTIMIZERS: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ("SGD", lambda parameters: torch.optim.SGD(parameters, 0.1)),
    "momentum": (
        "SGD, momentum",
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    ),
    "adam": ("Adam, AdamW", torch.optim.Adam),
    "adamw": ("Adam, AdamW", torch.optim.AdamW),
}


def allocated(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and moments."""
    found: list[torch.Tensor] = []
    for parameter in net.parameters():
        found += [parameter, *([] if parameter.grad is None else [parameter.grad])]
        states = optimizer.state.get(parameter, {}).values()
        found += [value for value in states if torch.is_tensor(value) and value.dim()]
    return stored(found)


def stored(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, of which some share their memory."""
    memory = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({part.data_ptr(): part.nbytes() for part in memory}.values())


@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    frozen=st.sets(st.integers(0, 3)),
    name=st.sampled_from(sorted(OPTIMIZERS)),
)
@settings(max_examples=40)
def test_a_rank_allocates_what_is_computed(widths: list[int], frozen: set[int], name: str) -> None:
    sizes = [4 * width for width in widths]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    for number in frozen.intersection(range(len(layers) - 1)):
        layers[number].requires_grad_(False)
    net = torch.nn.Sequential(*layers)
    kind, make = OPTIMIZERS[name]
    optimizer = make(net.parameters())
    net(torch.ones(2, sizes[0])).sum().backward()
    optimizer.step()
    whole = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert rank_bytes(4 * whole, 4 * trained, STATES[kind]) == allocated(net, optimizer)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["full", "optimizer"])
def test_a_rank_of_a_sharded_model_allocates_its_part(
    four_ranks: None, name: str, mode: str
) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    kind, make = OPTIMIZERS[name]
    optimizer = make(net.parameters())
    whole = 4 * sum(p.numel() for p in net.parameters())
    options = ShardingOptions(mode, ("Linear",))
    shard(net, [optimizer], options, torch.device("cpu"))
    loss = net(torch.ones(2, 8)).sum()
    between = stored(net.parameters())
    loss.backward()
    optimizer.step()
    assert rank_bytes(whole, whole, STATES[kind], 4, 0) == allocated(net, optimizer)
    # Between forward and backward pass, parameters stay gathered, or are parts again.
    assert between == (whole if mode == "optimizer" else whole // 4)


def test_the_doctor_prints_the_memory_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--parameters", "7e9", "--num-proc", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed == describe_memory(7 * 10**9, 8) + "\n"
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[2:5]}
    # Section 3.1 of the paper, with 4 bytes instead of 2: 16 bytes for Adam, an eighth of them.
    assert rows["sharding='none'"] == ["56.0", "84.0", "112.0"]
    assert rows["sharding='full'"] == ["7.0", "10.5", "14.0"]
    assert rows["sharding='optimizer'"] == ["35.0", "38.5", "42.0"]
