"""Fits that lose executors, ranks and finally the driver; run by test_restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from pyspark.sql import SparkSession, functions

from hvd_estimators import Store
from hvd_estimators.launch.spark_backend import SparkBackend
from hvd_estimators.torch import TorchEstimator

RANKS, EPOCHS, STEPS = 2, 3, 12


class FaultyLoss(torch.nn.Module):
    """Squared error that triggers faults on ranks, each once.

    Parameters
    ----------
    folder : Path
        Folder of notes about the faults that have occurred.
    faults : mapping
        Faults by rank and number of the call in its process, from 1.
    driver : int
        Process id of the driver.
    """

    def __init__(self, folder: Path, faults: Mapping[tuple[int, int], str], driver: int) -> None:
        super().__init__()
        self.folder, self.faults, self.driver = folder, faults, driver
        self.calls = 0
        self.pause = 0.0

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(self.pause)
        fault = self.faults.get((int(os.environ["HOROVOD_RANK"]), self.calls))
        if fault is not None and not (self.folder / fault).exists():
            (self.folder / fault).touch()
            self.act(fault)
        return ((output.squeeze(-1) - label) ** 2).mean()

    def act(self, fault: str) -> None:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "driver":
            os.kill(self.driver, signal.SIGKILL)
        elif fault == "preempted":
            executor_of_rank().terminate()
            # The rank trains on until all ranks have agreed on a last step.
            self.pause = 0.3
        else:
            executor_of_rank().kill()
            time.sleep(300)


def executor_of_rank() -> psutil.Process:
    """Return the process of this rank's executor, which shares the rank's folder."""
    for process in psutil.process_iter():
        # Processes of other tests may end meanwhile.
        with contextlib.suppress(psutil.Error):
            if process.name() == "java" and process.cwd() == os.getcwd():
                return process
    raise AssertionError("the executor of this rank has ended")


def losing_an_executor(marker: Path) -> Any:
    """Return a function of columns that kills its executor unless the marker exists."""

    @functions.udf("float")
    def unchanged(value: float) -> float:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return value
        next(parent for parent in psutil.Process().parents() if parent.name() == "java").kill()
        time.sleep(300)
        return value

    return unchanged


def fit(
    spark: Any,
    folder: Path,
    run_id: str,
    faults: Mapping[tuple[int, int], str] | None = None,
    **params: Any,
) -> Any:
    """Train with dropout, momentum and a learning rate schedule."""
    x = np.random.default_rng(0).normal(size=(4 * STEPS * RANKS, 3))
    rows = [(row.tolist(), float(row.sum())) for row in x]
    frame = spark.createDataFrame(rows, "x array<float>, y float").coalesce(1)
    preparing = losing_an_executor(folder / "preparing")
    frame = frame.withColumn("y", preparing("y"))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # The limit for a stopped process; Horovod's own check for slow ranks is an hour away.
    stalls = {"SHUTDOWN": "3", "CHECK": "3600"}
    env = {f"HOROVOD_STALL_{name}_TIME_SECONDS": value for name, value in stalls.items()}
    env["OMP_NUM_THREADS"] = "1"
    return TorchEstimator(
        store=Store.create(str(folder / "store")),
        run_id=run_id,
        model=model,
        optimizer=optimizer,
        loss=FaultyLoss(folder, faults or {}, os.getpid()),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        epochs=EPOCHS,
        random_seed=3,
        dry_run=False,
        backend=SparkBackend(RANKS, env=env),
        checkpoint_every_n_steps=2,
        verbose=0,
        **params,
    ).fit(frame)


def main(folder: Path, preempted: bool = False) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local-cluster[{RANKS},1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    (folder / "preparing").touch()
    alone = fit(spark, folder, "undisturbed")
    (folder / "preparing").unlink()
    # While rows are prepared, and in the first, second and last epoch.
    faults = {(0, 6): "executor", (1, 9): "stopped", (0, 17): "killed"}
    if preempted:
        faults = {(1, 9): "preempted"}
    disturbed = fit(spark, folder, "disturbed", faults, max_restarts=3)
    assert (folder / "preparing").exists()
    for weight, expected in zip(
        disturbed.getModel().parameters(), alone.getModel().parameters(), strict=True
    ):
        assert torch.equal(weight, expected), (weight, expected)
    assert disturbed.getHistory() == alone.getHistory()
    if preempted:
        return
    (folder / "histories.json").write_text(json.dumps(alone.getHistory()))
    fit(spark, folder, "left-alone", {(1, 17): "driver"})


if __name__ == "__main__":
    import restart_job

    # Under a name known to ranks and to another application.
    restart_job.main(Path(sys.argv[1]), "preempted" in sys.argv)
