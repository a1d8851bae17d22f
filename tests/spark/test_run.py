"""`run`: results, threads, and processes after failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import ended, wait_until

from hvd_estimators import run

pytestmark = [pytest.mark.spark, pytest.mark.once]

SLEEPING_RANKS = """
import os, subprocess, sys, time
from pyspark.sql import SparkSession
from hvd_estimators import run

def sleep(folder):
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    partial = os.path.join(folder, os.environ["HOROVOD_RANK"])
    with open(partial, "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {child.pid}")
    os.rename(partial, partial + ".pids")
    time.sleep(300)

SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
try:
    run(sleep, (sys.argv[1],))
except KeyboardInterrupt:
    print("interrupted")
"""


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def test_results_are_in_rank_order_and_env_reaches_the_ranks(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_DRIVER", "not seen")

    def work(base: int, step: int = 1) -> Any:
        names = ("HOROVOD_SIZE", "OF_DRIVER", "GIVEN")
        return base + step * int(os.environ["HOROVOD_RANK"]), [os.environ.get(n) for n in names]

    found = run(work, [10], {"step": 2}, num_proc=3, env={"GIVEN": "too"})
    assert found == [(10 + 2 * rank, ["3", None, "too"]) for rank in range(3)]


def test_several_threads_run_ranks_at_once(spark: Any, tmp_path: Path) -> None:
    """Wait in the ranks of each thread for the other thread's ranks."""

    def meet(mine: str, other: str) -> tuple[str, str]:
        (tmp_path / f"{mine}.{os.environ['HOROVOD_RANK']}").touch()
        wait_until((tmp_path / f"{other}.0").exists)
        return mine, os.environ["HOROVOD_SIZE"]

    def call(mine: str, other: str, num_proc: int) -> None:
        results.append(run(meet, (mine, other), num_proc=num_proc))

    results: list[Any] = []
    threads = [
        threading.Thread(target=call, args=("a", "b", 2)),
        threading.Thread(target=call, args=("b", "a", 1)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(results) == [[("a", "2")] * 2, [("b", "1")]]


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", SLEEPING_RANKS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Otherwise the ranks would get the signal, too, like in a terminal.
        start_new_session=True,
        text=True,
    )
    try:
        wait_until(lambda: len(pids_in(tmp_path)) == 6 or driver.poll() is not None)
        pids = pids_in(tmp_path)
        driver.send_signal(signal.SIGINT)
        out, _ = driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert len(pids) == 6
    assert "interrupted" in out
    wait_until(lambda: all(map(ended, pids)))
