"""KerasEstimator with KERAS_BACKEND=torch, in a program of its own: Keras reads it at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lean_environment import lean_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
OF_OTHERS = ["horovod", "keras_hub", "tensorflow", "tensorboard", "tf2onnx", "tf_keras"]


def run(python: str, environment: dict[str, str], *cases: str) -> None:
    path = os.pathsep.join(map(str, [HERE.parents[1], HERE, HERE.parent / "helpers"]))
    done = subprocess.run(
        [python, str(HERE / "keras_torch_job.py"), *cases],
        env={**environment, "KERAS_BACKEND": "torch", "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


def test_fits_end_as_one_process_without_tensorflow_and_horovod(tmp_path: Path) -> None:
    environment = lean_environment(tmp_path / "venv", OF_OTHERS)
    python = environment["PYSPARK_PYTHON"]
    missing = "import importlib.util as u; assert not any(map(u.find_spec, {!r}))"
    names = ["tensorflow", "horovod"]
    subprocess.run([python, "-c", missing.format(names)], env=environment, check=True)

    run(python, environment)


def test_fits_end_as_one_process_over_horovod() -> None:
    run(sys.executable, dict(os.environ), "over_horovod")
