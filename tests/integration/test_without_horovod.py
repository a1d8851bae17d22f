"""Training without Horovod, without compilers, and without calls that exist only on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from lean_environment import lean_environment
from other_systems import like_macos

pytestmark = [
    *(pytest.mark.spark, pytest.mark.once, pytest.mark.integration),
    pytest.mark.timeout(300),
]

JOB = Path(__file__).with_name("lean_job.py")
OF_TENSORFLOW = ("keras", "tensorflow", "tf_keras", "tf2onnx")


@pytest.fixture(scope="module")
def without_horovod(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of an environment with all packages except Horovod."""
    return lean_environment(tmp_path_factory.mktemp("lean") / "venv", ["horovod"])


@pytest.fixture(scope="module")
def with_torch_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of an environment without Horovod and TensorFlow."""
    return lean_environment(tmp_path_factory.mktemp("torch") / "venv", ["horovod", *OF_TENSORFLOW])


def output_of(environment: Mapping[str, str], *arguments: object, status: int = 0) -> str:
    """Run Python in an environment and return its output; check that no process or file is left."""
    mark = f"{os.getpid()} {arguments}"
    # Ranks inherit it by its prefix.
    done = subprocess.run(
        [environment["PYSPARK_PYTHON"], *map(str, arguments)],
        env={**environment, "TORCH_TEST_MARK": mark},
        cwd=environment["TMPDIR"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == status, done.stdout
    left = [p for p in psutil.process_iter(["environ"]) if _marked(p, mark)]
    assert not left
    # The folder of warm processes' sockets stays for the next launch.
    for name in ("hvd-estimators-rank-*", "hvd_estimators-*"):
        assert not list(Path(environment["TMPDIR"]).glob(name))
    return done.stdout


def _marked(process: psutil.Process, mark: str) -> bool:
    is_of_test = (process.info["environ"] or {}).get("TORCH_TEST_MARK") == mark
    # The warm process ends soon after its owner.
    return is_of_test and "--warm" not in process.cmdline()


@pytest.mark.soak
def test_torch_and_lightning_train_and_predict_on_spark(
    without_horovod: dict[str, str], tmp_path: Path
) -> None:
    assert output_of(without_horovod, JOB, "on_spark", tmp_path).endswith("done\n")


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_training_works_without_features_that_macos_lacks(
    with_torch_alone: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    environment = like_macos(tmp_path / "bin", with_torch_alone)

    for job in ("on_this_machine", "torch_on_spark"):
        assert output_of(environment, JOB, job, tmp_path / "store").endswith("done\n")
