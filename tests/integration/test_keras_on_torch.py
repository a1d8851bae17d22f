"""KerasEstimator with KERAS_BACKEND=torch, in a program of its own: Keras reads it at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERE = Path(__file__).parent


def test_fits_on_torch_end_as_one_process() -> None:
    path = os.pathsep.join(map(str, [HERE.parents[1], HERE, HERE.parent / "helpers"]))
    done = subprocess.run(
        [sys.executable, str(HERE / "keras_torch_job.py")],
        env={**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
