"""The recipe for Databricks: the init script beside the packages of cloud runtimes.

Needs root's rights, debootstrap, and the registries of Debian and PyPI.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_root import DebianRoot
from recipe_program import result_of

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).parents[2]
RECIPE = PROJECT / "deploy" / "databricks"
PYTHON = "/databricks/python/bin/python"


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, PROJECT], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[DebianRoot]:
    """Root folder with Python, packages and Spark where runtime 15.4 has them; and with torch."""
    packages = ["python3-venv", "python3-dev", "gcc", "openjdk-17-jre-headless", "procps"]
    root = DebianRoot(tmp_path / "root", "bookworm", packages)
    versions = pins(RECIPE / "runtime-15.4.txt")
    spark = versions.pop("pyspark")
    versions["cloudpickle"] = "2.2.1"
    requirements = "\n".join(f"{name}=={version}" for name, version in versions.items())
    root.path("/databricks").mkdir()
    root.path("/databricks/runtime.txt").write_text(f"{requirements}\ntorch==2.13.0\n")
    root.run(
        "python3 -m venv /databricks/python3 && ln -s python3 /databricks/python && "
        f"{PYTHON} -m pip install --no-compile -r /databricks/runtime.txt && "
        f"{PYTHON} -m pip install --target /databricks/spark/python pyspark=={spark}",
        tmp_path / "runtime.txt",
    )
    yield root
    shutil.rmtree(root.root)


def installed(root: DebianRoot, log: Path) -> dict[str, str]:
    listed = root.run(f"{PYTHON} -m pip list --format=json 2>/dev/null", log)
    return {each["name"]: each["version"] for each in json.loads(listed.splitlines()[0])}


def test_the_init_script_keeps_the_runtimes_packages_and_its_python_trains(
    runtime: DebianRoot, wheel: Path, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    for file in (wheel, RECIPE / "install.sh", PROJECT / "deploy" / "train.py"):
        shutil.copy(file, volume)
    mounts = {"/Volumes/main/default/hvd_estimators": volume}
    before = installed(runtime, tmp_path / "before.txt")
    assert "pyspark" not in before

    runtime.run(
        "bash /Volumes/main/default/hvd_estimators/install.sh",
        tmp_path / "install.txt",
        environment={"HVD_ESTIMATORS_EXTRAS": "torch,lightning", "DB_IS_DRIVER": "TRUE"},
        mounts=mounts,
    )

    after = installed(runtime, tmp_path / "after.txt")
    assert (before.pop("cloudpickle"), after["cloudpickle"][0]) == ("2.2.1", "3")
    assert before.items() <= after.items()
    assert {"hvd_estimators", "lightning", "tensorboard"} <= set(after) - set(before)
    assert "pyspark" not in after
    output = runtime.run(
        f"{PYTHON} /Volumes/main/default/hvd_estimators/train.py /store",
        tmp_path / "train.txt",
        environment={
            "PYTHONPATH": "/databricks/spark/python",
            "PYSPARK_PYTHON": PYTHON,
            "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell",
        },
        mounts=mounts,
    )
    assert len(result_of(output)["ranks"]) == 2
