"""The default process group on ranks: its operations against NumPy, DDP, sessions and failures."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch.collectives import session, sum_over_ranks

# Ranks must not import this module, which imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(180)

LIBRARIES = ("horovod", "torch")
OPS = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),  # Gloo has no int16
)


def values_of(rank: int, size: int = 6) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=size) + 2.0


def tensor_of(rank: int, size: int = 6) -> torch.Tensor:
    return torch.from_numpy(values_of(rank, size))


def run_operations(kind: str) -> dict[str, Any]:
    """Run each operation of the default group on this rank."""
    found: dict[str, Any] = {}
    with session(kind):
        rank, size = dist.get_rank(), dist.get_world_size()
        found["rank"], found["backend"] = rank, dist.get_backend()
        for op in OPS:
            own = tensor_of(rank)
            dist.all_reduce(own, getattr(dist.ReduceOp, op))
            found[op] = own.numpy()
        for op in ("SUM", "MAX"):
            output = torch.empty(6, dtype=torch.float64)
            parts = [tensor_of(10 * rank + other) for other in range(size)]
            dist.reduce_scatter(output, parts, getattr(dist.ReduceOp, op))
            found[f"reduce_scatter {op}"] = output.numpy()
            dist.reduce_scatter_tensor(output, torch.cat(parts), getattr(dist.ReduceOp, op))
            found[f"reduce_scatter_tensor {op}"] = output.numpy()
        strided = tensor_of(rank).reshape(2, 3).t()
        dist.all_reduce(strided)
        found["strided"] = strided.numpy()
        found["broadcast"], found["gathered"] = {}, {}
        for dtype in DTYPES:
            sent = torch.tensor([[rank, 1], [0, 2 + rank]]).to(dtype)
            outputs = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(outputs, sent)
            found["gathered"][str(dtype)] = [output.tolist() for output in outputs]
            dist.broadcast(sent, src=1)
            found["broadcast"][str(dtype)] = sent.tolist()
        number = torch.tensor(rank)
        dist.broadcast(number, src=1)
        found["number"] = number.item()
        whole = torch.empty(6 * size, dtype=torch.float64)
        dist.all_gather_into_tensor(whole, tensor_of(rank))
        found["all_gather_into_tensor"] = whole.numpy()

        sizes = [rank + 1] * size  # a rank sends rank + 1 numbers to each
        received = torch.empty(sum(range(1, size + 1)))
        sent = torch.full((sum(sizes),), float(rank))
        dist.all_to_all_single(received, sent, list(range(1, size + 1)), sizes)
        found["all_to_all_single"] = received.numpy().copy()
        equal = torch.arange(size).float() + 10 * rank
        dist.all_to_all_single(received[:size], equal)
        found["all_to_all"] = received[:size].numpy().copy()

        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "long": "x" * 1000 * rank})
        found["objects"] = [(o["rank"], len(o["long"])) for o in objects]
        chosen = [f"of {rank}"]
        dist.broadcast_object_list(chosen, src=1)
        found["object"] = chosen[0]

        with torch.inference_mode():
            inside = tensor_of(rank)
            dist.all_reduce(inside)
            found["inference"] = inside.numpy()
            found["weight"] = sum_over_ranks(rank + 1.0)

        dist.barrier()
        group = dist.new_group(backend="gloo")
        dist.all_reduce(number, group=group)
        found["Gloo"] = number.item()
    return found


@pytest.fixture(
    scope="module", params=[("horovod", 3), ("torch", 2)], ids=lambda case: f"{case[0]}-{case[1]}"
)
def ranks(request: Any) -> list[dict[str, Any]]:
    kind, size = request.param
    results: list[dict[str, Any]] = LocalBackend(size).run(run_operations, (kind,))
    assert {found["backend"] for found in results} == {
        {"horovod": "horovod", "torch": "gloo"}[kind]
    }
    return results


def test_reductions_of_the_default_group_agree_with_numpy(ranks: Any) -> None:
    size = len(ranks)
    whole = np.stack([values_of(rank) for rank in range(size)])
    for rank, found in enumerate(ranks):
        for op, reduce in OPS.items():
            np.testing.assert_allclose(found[op], reduce(whole, axis=0), rtol=1e-13)
        for op in ("SUM", "MAX"):
            parts = np.stack([values_of(10 * other + rank) for other in range(size)])
            expected = OPS[op](parts, axis=0)
            np.testing.assert_allclose(found[f"reduce_scatter {op}"], expected, rtol=1e-13)
            np.testing.assert_allclose(found[f"reduce_scatter_tensor {op}"], expected, rtol=1e-13)
        total = whole.sum(axis=0)
        np.testing.assert_allclose(found["strided"], total.reshape(2, 3).T, rtol=1e-13)
        np.testing.assert_allclose(found["inference"], total, rtol=1e-13)
        assert found["weight"] == sum(range(1, size + 1))


def test_exchanges_of_the_default_group_agree_with_numpy(ranks: Any) -> None:
    size = len(ranks)
    whole = np.stack([values_of(rank) for rank in range(size)])
    for rank, found in enumerate(ranks):
        for dtype in DTYPES:
            of_ranks = [torch.tensor([[r, 1], [0, 2 + r]]).to(dtype).tolist() for r in range(size)]
            assert found["gathered"][str(dtype)] == of_ranks
            assert found["broadcast"][str(dtype)] == of_ranks[1]
        assert (found["number"], found["Gloo"]) == (1, size)
        np.testing.assert_array_equal(found["all_gather_into_tensor"], whole.reshape(-1))
        of_each = np.repeat(np.arange(size), np.arange(1, size + 1))
        np.testing.assert_array_equal(found["all_to_all_single"], of_each)
        np.testing.assert_array_equal(found["all_to_all"], rank + 10 * np.arange(size))
        assert found["objects"] == [(other, 1000 * other) for other in range(size)]
        assert found["object"] == "of 1"


def network(seed: int) -> torch.nn.Module:
    """Return a network with a layer that is used by some batches only."""
    torch.manual_seed(seed)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)
            self.sometimes, self.never = torch.nn.Linear(8, 8), torch.nn.Linear(3, 3)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            hidden = self.first(rows).tanh()
            if rows[0, 0] > 0:
                hidden = self.sometimes(hidden)
            return self.second(hidden)

    return Network()


def rows_of_step(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(8, 3, generator=generator)
    rows[0, 0] = 1.0  # the first half uses the layer, and the second half does not
    rows[4, 0] = -1.0
    return rows


def train_by_ddp(kind: str) -> dict[str, np.ndarray]:
    with session(kind):
        rank = dist.get_rank()
        net = network(seed=rank)
        ddp = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            ddp(rows_of_step(step)[4 * rank : 4 * rank + 4]).square().mean().backward()
            optimizer.step()
        return {name: value.numpy() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("kind", LIBRARIES)
def test_ddp_ends_in_the_weights_of_one_process(kind: str) -> None:
    net = network(seed=0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        halves = rows_of_step(step).split(4)
        (sum(net(half).square().mean() for half in halves) / 2).backward()
        optimizer.step()
    for weights in LocalBackend(2).run(train_by_ddp, (kind,)):
        for name, value in net.state_dict().items():
            np.testing.assert_allclose(weights[name], value.numpy(), atol=1e-6)


def open_sessions(kind: str) -> list[Any]:
    """Open two sessions, before and after the program makes a default group itself."""
    found: list[Any] = []
    for has_own_group in (False, True):
        if has_own_group:
            dist.init_process_group("gloo")
        for _ in range(2):
            with session(kind):
                found.append((dist.get_backend(), sum_over_ranks(dist.get_rank() + 1.0)))
            found.append(dist.is_initialized())
    return found


@pytest.mark.parametrize(("kind", "size"), [("horovod", 1), ("horovod", 2), ("torch", 2)])
def test_sessions_make_and_destroy_the_group_or_use_the_programs(kind: str, size: int) -> None:
    total = size * (size + 1) / 2
    backend = {"horovod": "horovod", "torch": "gloo"}[kind]
    expected = [*[(backend, total), False] * 2, *[("gloo", total), True] * 2]
    assert LocalBackend(size).run(open_sessions, (kind,)) == [expected] * size


def errors_of_horovod() -> list[str]:
    """Return the errors of what Horovod lacks."""
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(torch.ones(1), dst=1 - dist.get_rank()),
        lambda: dist.reduce(torch.ones(1), dst=0),
        lambda: dist.barrier(dist.new_group([0])),
        lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BXOR),
    ]
    found = []
    with session("horovod"):
        for call in calls:
            try:
                call()
            except Exception as error:
                found.append(str(error))
    return found


def test_what_horovod_lacks_is_an_error_that_names_the_other_library() -> None:
    found = LocalBackend(2).run(errors_of_horovod)
    # Only rank 0 is in the group.
    assert [len(errors) for errors in found] == [4, 3]
    for error in [*found[0], *found[1]]:
        assert re.search(r"Horovod has no .* Set collectives='torch'", error)
