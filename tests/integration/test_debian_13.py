"""The README's commands on Debian 13, in a root folder: Python 3.13, GCC 14 and Java 21.

Needs root's rights, debootstrap, and the registries of Debian and PyPI.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian_root import DebianRoot, copy_project

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).parents[2]
# Packages that docs/install.rst requires and a container lacks.
PACKAGES = (
    *("python3-venv", "python3-dev", "openjdk-21-jre-headless", "g++", "make"),
    *("ca-certificates-java", "procps", "python3"),
)
TESTS = (
    "tests/integration/test_exactness.py tests/integration/test_keras_exactness.py "
    "tests/integration/test_lightning_exactness.py tests/spark/test_saved_models.py"
)

SCORE = re.compile(r"^(\w.{39}) +(\d+\.\d\d)$", re.MULTILINE)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DebianRoot]:
    debian = DebianRoot(tmp_path_factory.mktemp("debian") / "root", "trixie", PACKAGES)
    copy_project(PROJECT, debian.path("/project"))
    yield debian
    shutil.rmtree(debian.root)


def test_the_demo_and_fits_of_each_framework_succeed(debian: DebianRoot, tmp_path: Path) -> None:
    run = functools.partial(debian.run, folder="/project")
    versions = run("python3 --version; gcc -dumpversion; java -version", tmp_path / "v.txt")
    assert re.search(r'Python 3\.13\.\d+\s+14\s+openjdk version "21\.', versions)

    demo = run("make demo", tmp_path / "demo.txt")
    assert ".venv: without Petastorm, which Python 3.13 cannot have" in demo
    scores = {name.strip(): float(rmse) for name, rmse in re.findall(SCORE, demo)}
    assert len(scores) == 3, demo[-2000:]
    assert min(scores, key=scores.__getitem__) == "network (torch)", scores

    tests = run(f'make test PYTEST_ARGS="{TESTS}"', tmp_path / "tests.txt")
    assert int(re.search(r"(\d+) passed", tests)[1]) > 50, tests[-2000:]
