"""Unchanged programs for `torchrun` in Spark's barrier tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torchrun_programs
from torchrun_programs import PROGRAMS, assert_trained_as_alone
from variants import others_in_soak

from hvd_estimators import run, run_elastic

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


@pytest.mark.once
def test_relaunched_ranks_form_a_new_process_group(spark: Any) -> None:
    def fail_once() -> tuple[float, str]:
        total, restarts = sum_of_ranks(), os.environ["TORCHELASTIC_RESTART_COUNT"]
        if restarts == "0" and os.environ["RANK"] == "1":
            os._exit(3)
        return total, restarts

    assert run_elastic(fail_once, num_proc=2) == [(3.0, "1"), (3.0, "1")]
