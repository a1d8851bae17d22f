"""Runs that lose executors, ranks and their driver in a real cluster, with unchanged results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import restart_job
import torch

from hvd_estimators import Store, load_checkpoint
from hvd_estimators.store.runs import read_metadata

pytestmark = [pytest.mark.soak, pytest.mark.integration, pytest.mark.spark]


def test_a_run_survives_the_loss_of_executor_ranks_and_driver(spark: Any, tmp_path: Path) -> None:
    status, output = run_job(tmp_path)
    assert status == -signal.SIGKILL, output[-8000:]

    # Each loss is recorded, and reported in one line.
    store = Store.create(str(tmp_path / "store"))
    (fit,) = notes(store, "disturbed")["fits"]
    restarts = fit["restarts"]
    assert [restart["cause"] for restart in restarts] == ["lost", "stalled", "killed"]
    assert [restart["rank"] for restart in restarts] == [None, 1, 0]
    places = [(restart["epoch"], restart["step"]) for restart in restarts]
    assert places == sorted(places)
    assert {0, 1} <= {epoch for epoch, _ in places}
    lines = [line for line in output.splitlines() if "launched again" in line]
    assert len(lines) == 3
    for number, line in enumerate(lines, 1):
        assert f"restart {number} of at most 3" in line
        assert "from the checkpoint of epoch" in line

    # Another application resumes the run of the lost driver, in the middle of its epoch.
    assert notes(store, "left-alone")["state"] == "running"
    model = restart_job.fit(spark, tmp_path, "left-alone")
    assert json.loads((tmp_path / "histories.json").read_text()) == model.getHistory()
    alone = load_checkpoint(store, run_id="undisturbed").content["model"]
    for weight, expected in zip(model.getModel().parameters(), alone.values(), strict=True):
        assert torch.equal(weight, expected)
    states = [fit["state"] for fit in notes(store, "left-alone")["fits"]]
    assert states == ["interrupted", "finished"]


@pytest.mark.soak
def test_ranks_of_a_terminated_executor_save_their_current_step(tmp_path: Path) -> None:
    status, output = run_job(tmp_path, "preempted")
    assert status == 0, output[-8000:]
    (fit,) = notes(Store.create(str(tmp_path / "store")), "disturbed")["fits"]
    (restart,) = fit["restarts"]
    # Ranks had done eight steps at the signal, and checkpoints are two steps apart.
    assert restart["epoch"] * restart_job.STEPS + restart["step"] > 9, restart


def run_job(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return the exit status of the job's process and its output."""
    output = folder / "output.txt"
    with open(output, "wb") as file:
        ended = subprocess.run(
            [sys.executable, restart_job.__file__, str(folder), *arguments],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=400,
            check=False,
        )
    return ended.returncode, output.read_text()


def notes(store: Store, run_id: str) -> Any:
    return read_metadata(store, store.run_paths(run_id).run_path)
