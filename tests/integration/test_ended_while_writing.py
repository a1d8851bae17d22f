"""Drivers that receive SIGTERM while Spark writes their rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import writing_job

from hvd_estimators import Store
from hvd_estimators.prepare.datasets import stored_indices
from hvd_estimators.store.runs import read_metadata

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.soak]


def test_files_of_a_terminated_write_are_swept_and_the_run_resumes(
    spark: Any, tmp_path: Path
) -> None:
    (tmp_path / writing_job.SLOW).touch()
    with open(tmp_path / "output.txt", "wb") as output:
        driver = subprocess.Popen(
            [sys.executable, writing_job.__file__, str(tmp_path)],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / writing_job.WRITING).exists():
            assert driver.poll() is None, (tmp_path / "output.txt").read_text()[-8000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        half = list((tmp_path / "store").rglob("*.parquet"))
        assert half
        assert all("_temporary" in path.parts for path in half)
        started = psutil.Process(driver.pid).children(recursive=True)
        driver.terminate()
        assert driver.wait(60) == -signal.SIGTERM
        # Spark's processes end with the driver.
        _, left = psutil.wait_procs(started, timeout=60)
        assert not left
    finally:
        driver.kill()
        driver.wait()

    store = Store.create(str(tmp_path / "store"))
    (index,) = stored_indices(store)
    assert store.get_checkpoints("asked") == []

    # At once, though the other process did not record its end.
    (tmp_path / writing_job.SLOW).unlink()
    found = writing_job.fit(spark, tmp_path, "asked").getModel().state_dict()
    expected = writing_job.fit(spark, tmp_path, "undisturbed").getModel().state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert index not in stored_indices(store)
    assert not [path for path in (tmp_path / "store").rglob("*") if index in str(path)]
    assert not any(path.exists() for path in half)
    noted = read_metadata(store, store.run_paths("asked").run_path)
    assert noted is not None
    assert [fit["state"] for fit in noted["fits"]] == ["finished"]
