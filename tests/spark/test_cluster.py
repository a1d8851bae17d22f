"""Executors in processes of their own: GPUs, the store, and progress across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.slow
def test_executors_pin_gpus_share_the_store_and_report_progress(tmp_path: Path) -> None:
    job = Path(__file__).with_name("cluster_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
    assert "Epoch 2/2:" in done.stderr
    assert "rows/s, loss=" in done.stderr
