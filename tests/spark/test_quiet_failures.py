"""Output of a program whose fit fails while executors still import."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.once, pytest.mark.timeout(300)]

PROGRAM = textwrap.dedent(
    """
    import json

    from pyspark.sql import SparkSession

    from hvd_estimators.exceptions import ParamError
    from hvd_estimators.launch.spark_backend import SparkBackend

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    spark.range(1).collect()

    with SparkBackend(2).warming_up(lambda: json.dumps({})):
        raise ParamError("label_cols: there is no such column")
    """
)


@pytest.mark.soak
def test_spark_prints_nothing_after_the_message() -> None:
    program = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(program, env=os.environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "label_cols: there is no such column" in ended.stderr.splitlines()[-1]
    for word in ("ERROR", "TaskSetManager", "TaskKilled", "DAGScheduler", "java.lang"):
        assert word not in ended.stderr
