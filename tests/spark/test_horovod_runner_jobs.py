"""`HorovodRunner` in a Spark job: return value and driver output."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from hvd_estimators import HorovodRunner, log_to_driver
from hvd_estimators.exceptions import SlotsError

pytestmark = pytest.mark.spark


def work(number: int) -> tuple[int, int]:
    rank = int(os.environ["HOROVOD_RANK"])
    sys.stdout.write("".join(f"größe {rank} {i}\n" for i in range(2000)))
    print("error", rank, file=sys.stderr)
    log_to_driver(f"message {rank}")
    return number + rank, int(os.environ["HOROVOD_SIZE"])


@pytest.mark.parametrize("verbosity", ["log_callback_only", "all"])
def test_run_returns_rank_0s_value_and_prints_by_verbosity(
    spark: Any, capfd: pytest.CaptureFixture[str], verbosity: str
) -> None:
    """Capture file descriptors: with a local master, executors write to the driver's."""
    runner = HorovodRunner(np=2, driver_log_verbosity=verbosity)

    assert runner.run(work, number=5) == (5, 2)

    shown = capfd.readouterr()
    lines = [f"[{rank}]<stdout>:größe {rank} {i}" for rank in (0, 1) for i in range(2000)]
    errors = [f"[{rank}]<stderr>:error {rank}" for rank in (0, 1)]
    if verbosity == "log_callback_only":
        lines, errors = [], []
    assert sorted(shown.out.splitlines()) == sorted([*lines, "message 0", "message 1"])
    assert sorted(shown.err.splitlines()) == errors
    for rank in (0, 1):
        mine = [line for line in shown.out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [line for line in lines if line.startswith(f"[{rank}]")]


def test_zero_uses_all_slots_and_too_many_ranks_are_an_error(spark: Any) -> None:
    with pytest.warns(DeprecationWarning, match="np=0"):
        runner = HorovodRunner(np=0)
    assert runner.run(work, number=1) == (1, 3)
    with pytest.raises(SlotsError, match="3"):
        HorovodRunner(np=4).run(work, number=1)
