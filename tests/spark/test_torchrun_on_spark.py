"""Unchanged programs for `torchrun` in Spark's barrier tasks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torchrun_programs
from torchrun_programs import PROGRAMS, assert_trained_as_alone
from variants import others_in_soak

from hvd_estimators import HorovodRunner, run, run_elastic

pytestmark = [pytest.mark.spark, pytest.mark.slow]

cloudpickle.register_pickle_by_value(torchrun_programs)


def sum_of_ranks() -> float:
    """Return the sum of all ranks plus one each, in a process group of torch."""
    import torch

    torch.distributed.init_process_group("gloo")
    total = torch.tensor(torch.distributed.get_rank() + 1.0)
    torch.distributed.all_reduce(total)
    return float(total)


@pytest.mark.parametrize("program", others_in_soak(*PROGRAMS))
def test_a_torchrun_program_trains_like_one_process_without_horovod(
    spark: Any, program: Callable[[], dict[str, list[Any]]]
) -> None:
    def train() -> tuple[dict[str, list[Any]], bool]:
        found = program()
        return found, any(name.partition(".")[0] == "horovod" for name in sys.modules)

    of_ranks = run(train, num_proc=2)

    assert not any(uses_horovod for _, uses_horovod in of_ranks)
    for found in [found for found, _ in of_ranks if found]:
        assert_trained_as_alone(found)


@pytest.mark.soak
def test_concurrent_jobs_on_a_host_have_separate_process_groups(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open both groups at the same time, on an executor started by another launcher."""

    def meet(mine: str, other: str) -> tuple[float, str, str]:
        total = sum_of_ranks()
        (tmp_path / mine).touch()
        deadline = time.monotonic() + 60
        while not (tmp_path / other).exists():
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)
        return total, os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]

    outer = {"MASTER_PORT": "1", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in outer.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    found: dict[str, Any] = {}

    def call(mine: str, other: str, num_proc: int) -> None:
        found[mine] = run(meet, (mine, other), num_proc=num_proc)

    threads = [
        threading.Thread(target=call, args=("a", "b", 2)),
        threading.Thread(target=call, args=("b", "a", 1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    (a0, a1), (b0,) = found["a"], found["b"]
    assert a0 == a1
    assert (a0[0], b0[0]) == (3.0, 1.0)
    assert a0[1] != b0[1]
    assert a0[2] != b0[2]


@pytest.mark.once
def test_relaunched_ranks_form_a_new_process_group(spark: Any) -> None:
    def fail_once() -> tuple[float, str]:
        total, restarts = sum_of_ranks(), os.environ["TORCHELASTIC_RESTART_COUNT"]
        if restarts == "0" and os.environ["RANK"] == "1":
            os._exit(3)
        return total, restarts

    assert run_elastic(fail_once, num_proc=2) == [(3.0, "1"), (3.0, "1")]


@pytest.mark.once
def test_horovod_runner_returns_the_result_of_rank_0(spark: Any) -> None:
    assert HorovodRunner(np=2).run(sum_of_ranks) == 3.0
