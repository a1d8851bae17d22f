"""What examples show before their first own line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.once]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """\
import argparse, pathlib, sys
from common import start_spark
args = argparse.Namespace(master="local[1]", output=pathlib.Path(sys.argv[1]))
with start_spark(args, "quiet") as spark:
    print(spark.range(3).count())
"""


def test_spark_starts_without_a_line_on_the_screen(tmp_path: Path) -> None:
    unset = ("SPARK_CONF_DIR", "SPARK_HOME")
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = str(EXAMPLES)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, env=environment)
    # Java 21 prints this line for a module that Spark 4.3 adds.
    lines = [line for line in done.stderr.splitlines() if "jdk.incubator.vector" not in line]
    assert (done.stdout, lines) == ("3\n", [])
