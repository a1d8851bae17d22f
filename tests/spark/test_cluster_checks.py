"""The doctor of a cluster, as a command."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.mark.soak
def test_the_command_checks_a_session_of_its_own_and_says_how_it_went(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hvd_estimators",
        "doctor",
        "--cluster",
        "--master",
        "local[2]",
    ]
    command += ["--conf", "spark.ui.enabled=false", "--store", str(tmp_path / "store")]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=500)

    healthy = run()
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    driver, host = healthy.stdout.strip().split("\n\n")
    assert driver.startswith("driver\nPython ")
    assert f"{socket.gethostname()} (" in host
    assert "(ranks 0 to 1)" in host
    assert re.search(r"\nAllreduce +ok +2 processes in ", driver)
    assert re.search(r"\nStore +ok +all hosts read ", driver)

    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("a file")
    unusable = run("--json", "--num-proc", "1")
    assert unusable.returncode == 1, unusable.stdout + unusable.stderr
    problems = [row for row in json.loads(unusable.stdout) if row["status"] == "problem"]
    assert {row["component"] for row in problems} == {"Store"}
