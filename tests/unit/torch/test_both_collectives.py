"""The collectives of both libraries against NumPy."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from variants import others_in_soak

from hvd_estimators.exceptions import DependencyError, ParamError, WorkerFailedError
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.torch import collectives, process_group
from hvd_estimators.torch.collectives import (
    broadcast_tensors,
    current,
    exchange,
    reduce_group,
    session,
    sum_over_ranks,
)
from hvd_estimators.training.collectives_choice import choose_collectives

# Ranks must not import this module, which imports pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.timeout(180)

RANKS = 3
# Both libraries exchange up to 256 KiB of all ranks directly; this many numbers, and one more.
DIRECT_NUMBERS = 2**18 // (8 * RANKS)
SIZES = (0, DIRECT_NUMBERS, DIRECT_NUMBERS + 1)
LIBRARIES = ("horovod", "torch")
DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


OPERATIONS = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def values_of(rank: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=size)


def all_values(size: int = 1000) -> np.ndarray:
    return np.stack([values_of(rank, size) for rank in range(RANKS)])


def rows_of(rank: int) -> np.ndarray:
    """Rows of a rank: rank 1 has none, and the others have different numbers."""
    return values_of(rank, 2 * (5, 0, 3)[rank]).reshape(-1, 2)


def run_all(kind: str, folder: str) -> dict[str, Any]:
    """Run each operation on this rank, in two sessions."""
    with session(kind, ranks=RANKS):
        sum_over_ranks(1.0)
    with session(kind, ranks=RANKS) as mine:
        rank = mine.rank
        places = (mine.rank, mine.size, mine.local_rank, mine.local_size, mine.node_rank)
        found: dict[str, Any] = {"places": places}
        own = torch.from_numpy(values_of(rank))
        for op in ("mean", "sum", "min", "max"):
            found[op] = mine.reduce(own, op).numpy()
        assert torch.equal(own, torch.from_numpy(values_of(rank)))
        found["repeats"] = [mine.reduce(own.float(), "sum").numpy().tobytes() for _ in range(5)]

        for size in SIZES:
            numbers = torch.from_numpy(values_of(rank, size))
            found[size] = {op: mine.reduce(numbers, op).numpy() for op in OPERATIONS}

        # Two dtypes, one tensor that is not contiguous in memory, an empty one, and a number.
        group = [own[:600].float().reshape(20, 30), own[600:], torch.empty(0), torch.tensor(3.0)]
        reduce_group(group, "mean", "group")
        found["group"] = [tensor.numpy() for tensor in group]

        # Three at a time, finished in a different order than started.
        waits = [mine.reduce_async(own + turn, "sum", f"turn.{turn}") for turn in range(3)]
        found["turns"] = [waits[turn]().numpy() for turn in (2, 0, 1)]

        rows = torch.from_numpy(rows_of(rank))
        found["rows"] = mine.gather(rows).numpy()
        large = torch.full((300_000 if rank == 2 else rank, 2), float(rank), dtype=torch.float64)
        gathered = mine.gather(large)
        found["large"] = [len(gathered), gathered[:, 0].sum().item()]
        found["nothing"] = tuple(mine.gather(torch.empty(0, 4)).shape)

        index = torch.tensor([[rank, rank, 5]])
        sparse = torch.sparse_coo_tensor(index, torch.ones(3, 2) * (rank + 1), (6, 2))
        empty = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 2), (6, 2))
        found["sparse"] = mine.average_sparse_async(sparse, "sparse")().to_dense().numpy()
        few = sparse if rank == 1 else empty
        found["one sparse"] = mine.average_sparse_async(few, "few")().to_dense().numpy()
        found["no sparse"] = mine.average_sparse_async(empty, "none")().to_dense().numpy()

        state = {str(d): torch.tensor([rank, 1, 0]).to(d) for d in DTYPES}
        state["complex"] = torch.full((2, 2), complex(rank + 1, 1))
        state["strided"] = torch.full((3, 4), float(rank)).t()
        state["number"], state["none"] = torch.tensor(rank), torch.empty(0)
        broadcast_tensors({**state, "text": "no tensor"})
        found["broadcast"] = {name: tensor.tolist() for name, tensor in state.items()}

        with torch.inference_mode():
            found["inference"] = [
                exchange.gather({"rank": rank}, "objects"),
                sum_over_ranks(2.0**60 + rank * 2.0**10),
            ]
        found["objects"] = exchange.gather(torch.full((rank, 100_000), 1.0).sum(), "tensors")
        found["root"] = exchange.broadcast(f"of {rank}", "root", 2)

        mine.barrier()
        Path(folder, str(rank)).write_text("here")
        mine.barrier()
        found["files"] = len(list(Path(folder).iterdir()))
    try:
        current()
    except RuntimeError as error:
        found["outside"] = str(error)
    found["group after"] = torch.distributed.is_initialized()
    return found


@pytest.fixture(scope="module", params=LIBRARIES)
def ranks(request: Any, tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("files"))
    results: list[dict[str, Any]] = LocalBackend(RANKS).run(run_all, (request.param, folder))
    return results


@pytest.mark.parametrize("size", SIZES)
def test_small_and_large_tensors_have_the_same_reductions_on_all_ranks(
    ranks: Any, size: int
) -> None:
    for op, reduce in OPERATIONS.items():
        results = [found[size][op] for found in ranks]
        np.testing.assert_allclose(results[0], reduce(all_values(size), axis=0), atol=1e-15)
        assert len({result.tobytes() for result in results}) == 1


def test_reductions_agree_with_numpy_on_all_ranks(ranks: Any) -> None:
    whole = all_values()
    for rank, found in enumerate(ranks):
        assert found["places"] == (rank, RANKS, rank, RANKS, 0)
        for op in ("mean", "sum", "min", "max"):
            np.testing.assert_allclose(found[op], getattr(whole, op)(axis=0), rtol=1e-13)
            assert found[op].tobytes() == ranks[0][op].tobytes()
        assert set(found["repeats"]) == {ranks[0]["repeats"][0]}
        mean = whole.mean(axis=0)
        first, second, empty, number = found["group"]
        np.testing.assert_allclose(first.reshape(-1), mean[:600], atol=1e-6)
        np.testing.assert_allclose(second, mean[600:], rtol=1e-13)
        assert (empty.size, number) == (0, 3.0)
        for turn, total in zip((2, 0, 1), found["turns"], strict=True):
            np.testing.assert_allclose(total, whole.sum(axis=0) + RANKS * turn, rtol=1e-12)


def test_all_gather_accepts_parts_of_any_size(ranks: Any) -> None:
    for found in ranks:
        np.testing.assert_array_equal(
            found["rows"], np.concatenate([rows_of(rank) for rank in range(RANKS)])
        )
        assert found["large"] == [300_001, 600_001.0]
        assert found["nothing"] == (0, 4)
        expected = np.zeros((6, 2))
        for rank in range(RANKS):
            expected[rank] += 2 * (rank + 1) / RANKS
            expected[5] += (rank + 1) / RANKS
        np.testing.assert_allclose(found["sparse"], expected, rtol=1e-6)
        few = np.zeros((6, 2))
        few[1], few[5] = 4 / RANKS, 2 / RANKS
        np.testing.assert_allclose(found["one sparse"], few, rtol=1e-6)
        assert not found["no sparse"].any()
        assert found["objects"] == [0.0, 100_000.0, 200_000.0]
        assert found["root"] == "of 2"


def test_all_dtypes_are_broadcast(ranks: Any) -> None:
    for found in ranks:
        received = found["broadcast"]
        for dtype in DTYPES:
            assert received[str(dtype)] == torch.tensor([0, 1, 0]).to(dtype).tolist()
        assert received["complex"] == [[1 + 1j] * 2] * 2
        assert received["strided"] == [[0.0] * 3] * 4
        assert (received["number"], received["none"]) == (0, [])


def test_inference_mode_and_sessions(ranks: Any) -> None:
    for found in ranks:
        objects = [{"rank": other} for other in range(RANKS)]
        assert found["inference"] == [objects, 3 * 2.0**60 + 3 * 2.0**10]
        assert found["files"] == RANKS
        assert "no connection" in found["outside"]
        assert not found["group after"]


def reduce_until_killed(kind: str, folder: str) -> None:
    with session(kind) as mine:
        for step in range(1000):
            if mine.rank == 1 and step == 3:
                Path(folder, "killed at").write_text(repr(time.time()))
                os.kill(os.getpid(), 9)
            mine.reduce(torch.ones(100_000), "sum", "gradients")


@pytest.mark.parametrize("kind", LIBRARIES)
def test_other_ranks_fail_soon_and_name_a_killed_rank(kind: str, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkerFailedError, match=r"Rank 1 on .* was killed") as raised:
        LocalBackend(RANKS).run(reduce_until_killed, (kind, str(tmp_path)))
    # Ranks that hang would take a minute.
    assert time.time() - float((tmp_path / "killed at").read_text()) < 30
    assert (raised.value.rank, raised.value.cause) == (1, "killed")
    assert not set(psutil.Process().children(recursive=True)) - before


def hold_up(kind: str, seconds: float) -> None:
    process_group._LEAST_SECONDS = 15.0  # They start together.
    with session(kind) as mine:
        for step in range(5):
            if mine.rank == 2 and step == 3:
                time.sleep(seconds)
            mine.reduce(torch.ones(10), "sum", f"loss {step}")


@pytest.mark.parametrize("kind", LIBRARIES)
def test_errors_name_the_collective_that_a_slow_rank_holds_up(kind: str) -> None:
    told = {
        "horovod": r"Missing ranks:\s+2: \[allreduce\.loss 3\]",
        "torch": r"'loss 3' failed, .* or hangs: .*imed out",
    }
    limit = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    with pytest.raises(WorkerFailedError, match=told[kind]) as raised:
        LocalBackend(RANKS, env=limit).run(hold_up, (kind, 60.0))
    assert raised.value.is_transient


@pytest.mark.parametrize("has_nccl", others_in_soak(True, False))
def test_ranks_wait_for_others_to_connect_for_a_limited_time(has_nccl: bool) -> None:
    def meet() -> None:
        # Where torch has NCCL, ranks first exchange which GPUs they have.
        torch.distributed.is_nccl_available = lambda: has_nccl
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(60)
        with session("torch"):
            pass

    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}
    message = r"Rank 0 of 2 has not connected to all others in 2 s \(HOROVOD_GLOO_TIMEOUT_SECONDS\)"
    with pytest.raises(WorkerFailedError, match=message):
        LocalBackend(2, env=env).run(meet)


def test_ranks_connect_under_other_launchers_such_as_torchrun() -> None:
    """Without this project's rendezvous, torch's environment variables connect the ranks."""

    def meet(port: int) -> float:
        from hvd_estimators.launch.rendezvous.client import ADDRESS_VARIABLE, TOKEN_VARIABLE

        for name in (TOKEN_VARIABLE, ADDRESS_VARIABLE):
            del os.environ[name]
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        rank, size, *_ = (os.environ.pop(f"HOROVOD_{name}") for name in names)
        os.environ |= {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        with session("torch", ranks=2):
            return sum_over_ranks(float(rank) + 1)

    assert LocalBackend(2).run(meet, (free_port(),)) == [3.0, 3.0]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_that_cannot_connect_name_the_setting_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    for name in ("MASTER_ADDR", "HVD_ESTIMATORS_RENDEZVOUS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ParamError, match="collectives: 'torch' needs"), session("torch"):
        pass
    monkeypatch.delenv("HOROVOD_SIZE")
    with pytest.raises(RuntimeError, match=r"returned 3 ranks, and 1 have met"):
        session("torch", ranks=3).__enter__()


def test_auto_selects_horovod_if_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = collectives._Active.collectives
    assert choose_collectives("auto") == ("horovod", "it is built for this torch")
    assert choose_collectives("horovod") == ("horovod", "collectives='horovod'")
    assert choose_collectives("torch") == ("torch", "collectives='torch'")
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    kind, reason = choose_collectives("auto")
    assert kind == "torch"
    assert reason.startswith("this Python has no Horovod for torch")
    with pytest.raises(DependencyError, match=r"collectives: found 'horovod'.*build-horovod"):
        choose_collectives("horovod")
    with (
        pytest.raises(DependencyError, match=r"driver chose Horovod .*set collectives='torch'"),
        session("horovod"),
    ):
        pass
    assert collectives._Active.collectives is before


def test_keras_without_horovod_and_torch_names_both_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_collectives("auto", "tensorflow") == (
        "horovod",
        "it is built for this TensorFlow",
    )
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    kind, reason = choose_collectives("auto", "tensorflow")
    assert kind == "torch"
    assert reason.startswith("this Python has no Horovod for TensorFlow")
    monkeypatch.setattr("hvd_estimators.training.collectives_choice.find_spec", lambda _: None)
    with pytest.raises(DependencyError, match=r"torch is not installed.*\[torch\].*build-horovod"):
        choose_collectives("auto", "tensorflow")
    with pytest.raises(DependencyError, match=r"found 'torch', which needs torch"):
        choose_collectives("torch", "tensorflow")
