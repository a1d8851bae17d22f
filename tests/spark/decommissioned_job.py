"""Fit while Spark decommissions an executor; test_decommissioning.py runs this program.

The arguments are the folders of a store and of notes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import torch
from pyspark.sql import SparkSession

from hvd_estimators import Store
from hvd_estimators.fitting import restarts
from hvd_estimators.store.runs import read_metadata
from hvd_estimators.torch import TorchEstimator


class Slow(torch.nn.Linear):
    """Layer whose steps take long until another process deletes a file."""

    def __init__(self, folder: str) -> None:
        super().__init__(1, 1)
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and "HOROVOD_RANK" in os.environ:
            Path(self.folder, f"{os.getpid()}.rank").touch()
            if Path(self.folder, "slow").exists():
                time.sleep(0.3)
        return super().forward(x.reshape(-1, 1)).reshape(-1)


def ranks(folder: Path, count: int) -> list[int]:
    """Wait for the processes of some ranks that have trained."""
    while len(files := sorted(folder.glob("*.rank"), key=lambda f: f.stat().st_mtime)) < count:
        time.sleep(0.05)
    return [int(file.stem) for file in files]


def decommission(folder: Path) -> None:
    """Send one rank's executor the signal of Kubernetes's hook, once both ranks train."""
    rank = psutil.Process(ranks(folder, 2)[0])
    # Ranks are not children of the executor, but work in its folder.
    executors = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
    next(p for p in executors if p.cwd() == rank.cwd()).send_signal(signal.SIGPWR)
    # The relaunched ranks train fast.
    ranks(folder, 4)
    (folder / "slow").unlink()


def main(prefix: str, folder: Path) -> None:
    logging.basicConfig()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    restarts._LEAVING_PAUSE = 0.1
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.decommission.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    (folder / "slow").touch()
    frame = spark.range(160).selectExpr("id / 160D AS x", "id / 80D AS y")
    net = Slow(str(folder))
    threading.Thread(target=decommission, args=(folder,), daemon=True).start()
    store = Store.create(prefix)
    model = TorchEstimator(
        num_proc=2,
        store=store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        epochs=4,
        run_id="run",
        max_restarts=1,
        verbose=0,
    ).fit(frame)
    noted = read_metadata(store, store.run_paths("run").run_path)
    assert noted is not None
    print(json.dumps([model.summary.restarts, noted["fits"][0]["restarts"]]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
