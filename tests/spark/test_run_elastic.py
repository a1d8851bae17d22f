"""`run_elastic`: lost ranks, relaunches, and the state that ranks resume from."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hvd_estimators import run_elastic
from hvd_estimators.exceptions import WorkerFailedError
from hvd_estimators.launch.spark_backend import SparkBackend

pytestmark = [pytest.mark.spark, pytest.mark.once]

EPOCHS, BATCHES = 3, 2


KILLS = 8


def batch(epoch: int, number: int, rank: int) -> torch.Tensor:
    seed = 100 * epoch + 10 * number + rank
    return torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))


def trained_in_one_process(num_ranks: int, epochs: int = EPOCHS) -> list[Any]:
    model, optimizer = model_and_optimizer()
    for epoch in range(epochs):
        for number in range(BATCHES):
            optimizer.zero_grad()
            rows = torch.cat([batch(epoch, number, rank) for rank in range(num_ranks)])
            (model(rows) - 1).pow(2).mean().backward()
            optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(fail_once: Callable[[int, int, int], None], epochs: int = EPOCHS) -> Any:
    """Train like the example in Horovod's documentation."""
    import horovod.torch as hvd

    hvd.init()
    model, optimizer = model_and_optimizer()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    resets: list[int] = []

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train_batches(state: Any) -> Any:
        state.rendezvous += 1
        while state.epoch < epochs:
            while state.batch < BATCHES:
                optimizer.zero_grad()
                rows = batch(state.epoch, state.batch, hvd.rank())
                (model(rows) - 1).pow(2).mean().backward()
                optimizer.step()
                fail_once(hvd.rank(), state.epoch, state.batch)
                state.batch += 1
                state.commit()
            state.batch = 0
            state.epoch += 1
        parameters = [parameter.tolist() for parameter in model.parameters()]
        return [hvd.rank(), state.epoch, state.batch, state.rendezvous], parameters, resets

    state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, rendezvous=0)
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    return train_batches(state)


def failing(folder: Path, failures: list[tuple[int, int, int]]) -> Callable[[int, int, int], None]:
    """Return a function that ends a rank once at each place, by exit and by signal in turn."""

    def fail_once(*place: int) -> None:
        marker = folder / "-".join(map(str, place))
        if place in failures and not marker.exists():
            marker.touch()
            if failures.index(place) % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)

    return fail_once


def test_a_torch_program_resumes_exactly_from_its_last_commit(spark: Any, tmp_path: Path) -> None:
    fail_once = failing(tmp_path, [(1, 0, 1), (0, 2, 1)])
    results = run_elastic(train, (fail_once,), num_proc=2)

    weights, bias = trained_in_one_process(2)
    for rank, (place, parameters, resets) in enumerate(results):
        assert place == [rank, EPOCHS, 0, 3]
        assert parameters[0][0] == pytest.approx(weights[0], abs=1e-6)
        assert parameters[1] == pytest.approx(bias, abs=1e-6)
        assert resets == [1]
    assert results[0][1] == results[1][1]


def count(folder: str, until: int = 6) -> tuple[int, int, int]:
    """Count to a number over several launches, quickly and without a framework."""
    from horovod.common.elastic import ObjectState, run_fn

    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    state = ObjectState(lambda value: value, lambda: rank, number=0)

    def go_on(state: Any) -> None:
        while state.number < until:
            state.number += 1
            state.commit()
            marker = Path(folder, f"failed at {state.number}")
            if state.number % 3 == 0 and rank == 0 and not marker.exists():
                marker.touch()
                raise OSError(f"on purpose at {state.number}")

    run_fn(go_on, lambda: None)(state)
    return state.number, size, len(list(Path(folder).iterdir()))


def test_failed_ranks_are_relaunched_on_more_or_fewer_slots(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more").mkdir()
    more = str(tmp_path / "more")
    assert run_elastic(count, (more,), num_proc=2, max_num_proc=5) == [(6, 3, 2)] * 3

    (tmp_path / "fewer").mkdir()
    monkeypatch.setattr(SparkBackend, "task_slots", lambda self: 1)
    monkeypatch.setattr("hvd_estimators.launch.relaunch._RETURN_SECONDS", 0.0)
    fewer = str(tmp_path / "fewer")
    assert run_elastic(count, (fewer,), num_proc=3, min_num_proc=1) == [(6, 1, 2)]


def test_reset_limit_ends_the_job_with_the_last_ranks_error(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match="on purpose at 6") as caught:
        run_elastic(count, (str(tmp_path), 9), num_proc=1, reset_limit=1)
    assert (caught.value.relaunches, caught.value.error_type) == (1, "OSError")
    assert "reset_limit=1 allows no more" in str(caught.value)


@pytest.mark.soak
def test_ranks_killed_at_random_train_like_one_process(spark: Any, tmp_path: Path) -> None:
    """Kill ranks, guardians, and the guardians' parents: a warm process or a task's worker."""
    epochs = 60
    dice = random.Random(0)
    ended = threading.Event()
    killed: list[str] = []

    def tell_and_wait(rank: int, *place: int) -> None:
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        time.sleep(0.1)

    def kill_now_and_then() -> None:
        while len(killed) < KILLS and not ended.wait(dice.uniform(2, 12)):
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                rank = psutil.Process(int((tmp_path / dice.choice("01")).read_text()))
                victim = dice.choice([rank, *rank.parents()[:2]])
                killed.append(f"{victim.pid} above {rank.pid}")
                victim.kill()

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        results = run_elastic(train, (tell_and_wait, epochs), num_proc=2)
    finally:
        ended.set()
        killer.join()
        print(killed)
    print(f"{len(killed)} kills, {results[0][0][3]} starts that came to a commit")
    weights, bias = trained_in_one_process(2, epochs)
    for _, parameters, _ in results:
        assert parameters[0][0] == pytest.approx(weights[0], abs=1e-5)
        assert parameters[1] == pytest.approx(bias, abs=1e-5)
    assert len(killed) >= 3
