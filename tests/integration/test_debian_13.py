"""The README's commands on Debian 13, in a root folder: Python 3.13, GCC 14 and Java 21.

Needs root's rights, debootstrap, and the registries of Debian and PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
# Packages that docs/install.rst requires and a container lacks.
PACKAGES = (
    "python3-venv,python3-dev,openjdk-21-jre-headless,g++,make,"
    "ca-certificates,ca-certificates-java,procps,python3"
)
# Certificates and pip settings with which this machine reaches the registries.
SETTINGS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pip.conf",
    "/etc/xdg/pip",
    "/etc/resolv.conf",
    "/etc/hosts",
)
TESTS = (
    "tests/integration/test_exactness.py tests/integration/test_keras_exactness.py "
    "tests/integration/test_lightning_exactness.py tests/spark/test_saved_models.py"
)

SCORE = re.compile(r"^(\w.{39}) +(\d+\.\d\d)$", re.MULTILINE)


class Debian:
    """Root folder for commands, which run in separate process and mount namespaces."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, command: str, log: Path) -> str:
        """Run a command in a copy of the project; return its output."""
        mounts = ["mount -t proc proc proc", "mount --rbind /sys sys", "mount --rbind /dev dev"]
        for folder in wheel_folders():
            (self.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {folder} .{folder}")
        kept = {k: v for k, v in os.environ.items() if re.search("(?i)^pip_|_proxy$|cert", k)}
        settings = [f"{name}={value}" for name, value in kept.items()]
        inside = ["env", "-i", "HOME=/root", "LANG=C.UTF-8", "PATH=/usr/bin:/usr/sbin", *settings]
        script = " && ".join([*mounts, 'exec chroot . "$@"'])
        shell = ["sh", "-ec", f"cd /project && {command}"]
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        with log.open("w") as file:
            done = subprocess.run(
                # All processes end with the first one, and so do the mounts.
                [*apart, "sh", "-ec", script, "sh", *inside, *shell],
                cwd=self.root,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        output = log.read_text(errors="replace")
        assert done.returncode == 0, output[-4000:]
        return output


def wheel_folders() -> list[str]:
    """Return the folders that pip's configuration names."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    values = re.split(r"[\s'\"]+", re.sub(r"\\n", " ", shown.stdout))
    paths = [urlsplit(value).path for value in values if value.startswith(("/", "file:///"))]
    return sorted({path for path in paths if Path(path).is_dir()})


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Debian]:
    root = tmp_path_factory.mktemp("debian") / "root"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "trixie", root, MIRROR],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name in filter(os.path.exists, SETTINGS):
        target = root / name.lstrip("/")
        if Path(name).is_dir():
            shutil.copytree(name, target, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(name).read_bytes())
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        target = root / "project" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, target)
    yield Debian(root)
    shutil.rmtree(root)


def test_the_demo_and_fits_of_each_framework_succeed(debian: Debian, tmp_path: Path) -> None:
    versions = debian.run("python3 --version; gcc -dumpversion; java -version", tmp_path / "v.txt")
    assert re.search(r'Python 3\.13\.\d+\s+14\s+openjdk version "21\.', versions)

    demo = debian.run("make demo", tmp_path / "demo.txt")
    assert ".venv: without Petastorm, which Python 3.13 cannot have" in demo
    scores = {name.strip(): float(rmse) for name, rmse in re.findall(SCORE, demo)}
    assert len(scores) == 3, demo[-2000:]
    assert min(scores, key=scores.__getitem__) == "network (torch)", scores

    tests = debian.run(f'make test PYTEST_ARGS="{TESTS}"', tmp_path / "tests.txt")
    assert int(re.search(r"(\d+) passed", tests)[1]) > 50, tests[-2000:]
