"""Streams of many micro-batches, in applications that are killed and in one that is not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(1200)]

JOB = Path(__file__).with_name("stream_job.py")


def test_killed_applications_write_each_row_once(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(JOB), "write", str(tmp_path)]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    chance, commits = random.Random(7), tmp_path / "checkpoint" / "commits"

    def done() -> int:
        return sum(path.name.isdigit() for path in commits.iterdir()) if commits.exists() else 0

    for kills in range(5):
        wanted, deadline = 2 * kills + 1, time.monotonic() + 180
        with start() as process:
            while done() < wanted and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            # The kill comes before, during or after the next write.
            time.sleep(chance.uniform(0, 0.6))
            # The group includes the JVM, which would otherwise continue for a moment.
            os.killpg(process.pid, signal.SIGKILL)
    assert 9 <= done() <= 12
    with start() as process:
        output, _ = process.communicate(timeout=560)
    assert process.returncode == 0, output
    assert "all well" in output


def test_nothing_grows_over_200_micro_batches(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(JOB), "memory", str(tmp_path), "200"],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well in" in done.stdout
