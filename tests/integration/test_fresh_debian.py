"""The README's commands on fresh Debian systems, in root folders: the demo without a compiler.

Needs root's rights, debootstrap, and the registries of Debian and PyPI.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from debian_root import DebianRoot, copy_project

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(7200)]

PROJECT = Path(__file__).parents[2]
TESTS = (
    "tests/integration/test_exactness.py tests/integration/test_keras_exactness.py "
    "tests/integration/test_lightning_exactness.py tests/spark/test_saved_models.py"
)

SCORE = re.compile(r"^(\w.{39}) +(\d+\.\d\d)$", re.MULTILINE)


class Release(NamedTuple):
    """A release of Debian: its name, and the versions of Python, Java and GCC that it has."""

    suite: str
    python: str
    java: int
    gcc: int


@pytest.fixture(params=[Release("bookworm", "3.11", 17, 12), Release("trixie", "3.13", 21, 14)])
def release(request: pytest.FixtureRequest) -> Release:
    return request.param


@pytest.fixture
def debian(release: Release, tmp_path: Path) -> Iterator[DebianRoot]:
    # What the README lists for the demo, and packages that a container lacks.
    listed = ("python3-venv", f"openjdk-{release.java}-jre-headless", "make")
    system = ("ca-certificates-java", "procps", "python3")
    debian = DebianRoot(tmp_path / "root", release.suite, [*listed, *system])
    copy_project(PROJECT, debian.path("/project"))
    yield debian
    shutil.rmtree(debian.root)


def test_the_demo_needs_no_compiler_and_the_tests_follow(
    release: Release, debian: DebianRoot, tmp_path: Path
) -> None:
    run = functools.partial(debian.run, folder="/project")
    versions = run("! command -v g++; python3 --version; java -version", tmp_path / "v.txt")
    assert re.search(rf'Python {release.python}\.\d+\s+openjdk version "{release.java}\.', versions)

    demo = run("make demo", tmp_path / "demo.txt")
    assert "2 processes average gradients with torch.distributed." in demo
    scores = {name.strip(): float(rmse) for name, rmse in re.findall(SCORE, demo)}
    assert len(scores) == 3, demo[-2000:]
    assert min(scores, key=scores.__getitem__) == "network (torch)", scores

    refused = run("make setup || true", tmp_path / "refused.txt")
    assert "No C++ compiler, which Horovod is built with. On Debian: apt-get install g++" in refused
    compiler = run(
        "apt-get update; apt-get install -y g++ python3-dev; g++ -dumpversion", tmp_path / "gcc.txt"
    )
    assert compiler.splitlines()[-1] == str(release.gcc)
    tests = run(f'make test PYTEST_ARGS="{TESTS}"', tmp_path / "tests.txt")
    assert int(re.search(r"(\d+) passed", tests)[1]) > 50, tests[-2000:]
    without = ".venv: without Petastorm, which Python 3.13 cannot have"
    assert (without in tests) == (release.python == "3.13")
