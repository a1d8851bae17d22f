"""Killed executors and a killed driver on a local cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.once


@pytest.mark.spark
@pytest.mark.slow
def test_a_killed_executor_is_reported_and_its_ranks_end(tmp_path: Path) -> None:
    job = Path(__file__).with_name("cluster_failures_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(tmp_path), "end well"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout


@pytest.mark.spark
@pytest.mark.slow
def test_ranks_on_executors_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    job = Path(__file__).with_name("cluster_failures_job.py")
    driver = subprocess.Popen([sys.executable, str(job), str(tmp_path), "be killed"])
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("*.pids"))) < 2:
            assert time.monotonic() < deadline, "the ranks have not started"
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    files = tmp_path.glob("*.pids")
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    print(f"all ranks had ended {30 - deadline + time.monotonic():.1f} s after the driver")
