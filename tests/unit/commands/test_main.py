"""The command line, as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

import hvd_estimators
from hvd_estimators.__main__ import main
from hvd_estimators.commands import build
from hvd_estimators.exceptions import BuildError


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "hvd_estimators"],
        [str(Path(sys.executable).parent / "hvd-estimators")],
    ],
    ids=["module", "script"],
)
def test_version_is_that_of_the_package(command):
    done = subprocess.run([*command, "--version"], text=True, capture_output=True)

    assert done.returncode == 0
    assert done.stdout == f"hvd-estimators {hvd_estimators.__version__}\n"


def test_the_command_line_imports_neither_frameworks_nor_spark():
    script = (
        "import sys\n"
        "import hvd_estimators.__main__\n"
        "import hvd_estimators.commands.build, hvd_estimators.commands.doctor\n"
        "print({'torch', 'tensorflow', 'pyspark', 'horovod', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)

    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["build-horovod", "--jobs", "0"],
        ["build-horovod", "--gpu", "rocm"],
        ["doctor", "--cluster", "--conf", "spark.executor.cores"],
        ["doctor", "--cluster", "--conf", "=4"],
    ],
)
def test_wrong_usage_exits_with_2_and_prints_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)

    assert raised.value.code == 2
    assert "usage: hvd-estimators" in capsys.readouterr().err


@pytest.fixture
def builds(monkeypatch):
    """Replace the build; the list receives the keywords of each call."""
    calls = []

    def fake_build(**keywords):
        calls.append(keywords)
        return Path("/cache/horovod.whl")

    monkeypatch.setattr(build, "build_horovod", fake_build)
    return calls


def test_flags_reach_the_build(builds):
    arguments = ["--gpu", "none", "--cache-dir", "/cache", "--force", "--no-install", "--jobs", "3"]
    arguments.append("--with-compat")

    assert main(["build-horovod", *arguments]) == 0
    assert main(["build-horovod"]) == 0

    given = {"gpu": "none", "cache_dir": Path("/cache"), "force": True, "install": False, "jobs": 3}
    default = {"gpu": "auto", "cache_dir": None, "force": False, "install": True, "jobs": None}
    assert builds == [{**given, "with_compat": True}, {**default, "with_compat": None}]


def test_a_failure_exits_with_1_and_prints_its_message_without_a_traceback(monkeypatch, capsys):
    def fail(**keywords):
        raise BuildError("No C++ compiler found")

    monkeypatch.setattr(build, "build_horovod", fail)

    assert main(["build-horovod"]) == 1
    output = capsys.readouterr()
    assert output.err == "hvd-estimators: No C++ compiler found\n"


def test_a_terminated_build_ends_its_compilers(tmp_path):
    """SIGTERM, as from a scheduler, runs the code that ends the build's processes."""
    script = f"""
import os, signal, sys, time
from hvd_estimators.commands import build
from hvd_estimators.__main__ import main
def slow(**keywords):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        open({str(tmp_path / "ended")!r}, "w").close()
build.build_horovod = slow
main(["build-horovod"])
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60)

    assert done.returncode == 128 + 15
    assert (tmp_path / "ended").exists()
