"""Kill executors, or this process, while ranks run; test_cluster.py runs this program.

Each rank holds Python's lock and has a child in a separate session.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from hvd_estimators import run_elastic
from hvd_estimators.exceptions import JobCancelledError, WorkerFailedError
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.launch.warm.server import NAME

PATIENCE = 60 * float(os.environ.get("HVD_TEST_PATIENCE", "1"))


def hold_the_lock(folder: str) -> None:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    partial = Path(folder, f"{os.environ['HOROVOD_RANK']}.partial")
    partial.write_text(f"{os.getpid()} {child.pid}")
    partial.rename(partial.with_suffix(".pids"))
    ctypes.PyDLL(None).sleep(300)


def commit_and_lose_the_executor(marker: str) -> tuple[str, int]:
    """Kill the executor of rank 0, once."""
    from horovod.common.elastic import ObjectState, run_fn

    rank = os.environ["HOROVOD_RANK"]

    def go_on(state: Any) -> None:
        state.launches += 1
        state.commit()
        if rank == "0" and not Path(marker).exists():
            Path(marker).touch()
            next(p for p in psutil.Process().parents() if p.name() == "java").kill()
            time.sleep(300)

    state = ObjectState(lambda value: value, lambda: int(rank), launches=0)
    run_fn(go_on, lambda: None)(state)
    return rank, state.launches


def wait_until(condition: Callable[[], bool]) -> float:
    """Return the seconds until a condition holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < PATIENCE, "waited too long"
        time.sleep(0.02)
    return time.monotonic() - started


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def main(folder: Path, then: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    seconds: list[float] = []

    def end_by(act: Callable[[psutil.Process], None]) -> None:
        """Act on the executor of rank 0 once both ranks run, and wait until the ranks end."""
        files = [folder / f"{rank}.pids" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        rank = psutil.Process(pids[0])
        warm = rank.parents()[1]
        assert warm.name() == NAME
        # Ranks are not children of the executor, but work in its folder.
        executors = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
        for file in files:
            file.unlink()
        act(next(executor for executor in executors if executor.cwd() == rank.cwd()))
        # The other executor's ranks end when Spark cancels their task, after 2 to 4 seconds.
        seconds.append(wait_until(lambda: all(map(ended, pids[:2]))))
        wait_until(lambda: all(map(ended, [*pids, warm.pid])))

    def run(act: Callable[[psutil.Process], None]) -> None:
        thread = threading.Thread(target=end_by, args=(act,))
        thread.start()
        try:
            SparkBackend(2).run(hold_the_lock, (str(folder),))
        finally:
            thread.join()

    if then == "be killed":
        SparkBackend(2).run(hold_the_lock, (str(folder),))
    with pytest.raises(WorkerFailedError, match="An executor, or its Python") as caught:
        run(lambda executor: executor.kill())
    assert caught.value.host
    assert "ExecutorLostFailure" in str(caught.value)
    # The job waits for the executor that replaces the lost one; so does an elastic job.
    marker = str(folder / "lost")
    assert run_elastic(commit_and_lose_the_executor, (marker,), num_proc=2) == [("0", 2), ("1", 2)]
    with pytest.raises(JobCancelledError, match="shut down"):
        run(lambda executor: spark.stop())
    assert seconds[0] < 5, seconds
    print("all well", seconds)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
