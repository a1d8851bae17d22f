"""Unchanged programs for `torchrun`, on ranks of `LocalBackend`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torchrun_programs
from torchrun_programs import PROGRAMS, assert_trained_as_alone, train_ddp
from variants import others_in_soak

from hvd_estimators import HorovodRunner
from hvd_estimators.launch.local_backend import LocalBackend

pytestmark = [pytest.mark.integration, pytest.mark.slow]

cloudpickle.register_pickle_by_value(torchrun_programs)


@pytest.mark.parametrize("program", others_in_soak(*PROGRAMS))
def test_programs_train_as_one_process_next_to_horovod(
    program: Callable[[], dict[str, list[Any]]],
) -> None:
    def train_and_reduce() -> tuple[dict[str, list[Any]], float]:
        import horovod.torch as hvd
        import torch

        found = program()
        hvd.init()
        return found, float(hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum))

    # One launch per program: a second program in a process would find torch's old store.
    of_ranks = LocalBackend(2, verbose=0).run(train_and_reduce)

    assert [total for _, total in of_ranks] == [3.0, 3.0]
    for found in [found for found, _ in of_ranks if found]:
        assert_trained_as_alone(found)


def test_horovod_runner_runs_programs_without_horovod() -> None:
    def train() -> tuple[dict[str, list[Any]], set[str]]:
        found = train_ddp()
        return found, {name.partition(".")[0] for name in sys.modules}

    found, modules = HorovodRunner(np=-2).run(train)

    assert_trained_as_alone(found)
    assert "horovod" not in modules
