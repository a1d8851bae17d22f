"""Training with the oldest supported torch and Lightning. Downloads them, with CUDA: some GB."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from lean_environment import ROOT, lean_environment

pytestmark = [
    *(pytest.mark.spark, pytest.mark.once, pytest.mark.integration, pytest.mark.soak),
    pytest.mark.timeout(1200),
]

JOB = Path(__file__).with_name("lean_job.py")
REPLACED = ("torch", "functorch", "lightning", "pytorch_lightning", "sympy", "horovod", "triton")


def oldest(extra: str) -> str:
    """Return a framework's requirement in setup.cfg, with the oldest version."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"][extra].splitlines()
    (requirement,) = [line for line in lines if line.startswith(f"{extra}>=")]
    return requirement.replace(">=", "==")


def test_torch_and_lightning_train_like_one_process(tmp_path: Path) -> None:
    environment = lean_environment(tmp_path / "venv", REPLACED)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--target", str(site)]
    wanted = [oldest("torch"), oldest("lightning")]
    # Of all other packages pip warns that they are there.
    subprocess.run([*command, *wanted], check=True, capture_output=True)
    code = "import torch, lightning; print(torch.__version__, lightning.__version__)"
    python = environment["PYSPARK_PYTHON"]
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    versions = [version.partition("+")[0] for version in found.split()]
    assert all(v.startswith(w.partition("==")[2]) for v, w in zip(versions, wanted, strict=True))

    done = subprocess.run(
        [python, str(JOB), "on_spark", str(tmp_path / "store")],
        env=environment,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    assert done.stdout.endswith("done\n"), done.stdout
