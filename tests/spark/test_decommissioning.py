"""An executor that Spark decommissions while ranks train on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.slow
def test_ranks_save_their_step_before_a_decommissioned_executor_goes(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    job = subprocess.run(
        [sys.executable, "decommissioned_job.py", str(tmp_path / "store"), str(notes)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Spark decommissions an executor on" in job.stderr
    count, (restart,) = json.loads(job.stdout.splitlines()[-1])
    assert count == 1
    assert restart["error_type"] == "TrainingInterruptedError"
    # With verbose=0, ranks report no steps: the record has seconds instead.
    assert (0, 0) < (restart["epoch"], restart["step"]) < (4, 0)
