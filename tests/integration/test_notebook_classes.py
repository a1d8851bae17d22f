"""Classes of a notebook keep working after fits, predictions and loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("notebook_job.py")


@pytest.mark.soak
@pytest.mark.parametrize(
    "framework",
    ["torch", "keras", "lightning"],
)
def test_notebook_variables_still_take_effect_after_a_fit(framework: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(JOB), framework, str(tmp_path / "store")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
