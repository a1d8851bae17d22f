"""Steps per second of `LightningEstimator`, against plain Lightning over tensors in memory.

Both have two ranks and the same module, strategy, logger, rows and batches. The estimator reads
Parquet. They run in turns, and the best epoch of each counts, without the first of each turn.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as lightning
import torch
from pytorch_lightning.loggers import TensorBoardLogger

from benchmarks.common import HIDDEN, WIDTH, training_options, write_regression_data
from benchmarks.figures import compared, show_result, show_table
from hvd_estimators import Store
from hvd_estimators.launch.local_backend import LocalBackend
from hvd_estimators.lightning import HorovodStrategy, LightningEstimator

LEARNING_RATE = 1e-3


class Net(lightning.LightningModule):
    """A network 8-64-1 with mean squared error and Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch["features"])[:, 0], batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


class Clock(lightning.Callback):
    """Write the seconds of each epoch to a file, on the first rank."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        if trainer.global_rank == 0:
            np.save(self.path, self.seconds)


class InMemory:
    """Shuffled batches of tensors: the minimal loader."""

    def __init__(self, columns: dict[str, torch.Tensor], batch_size: int) -> None:
        self.columns = columns
        self.batch_size = batch_size
        self.rows = len(columns["label"])

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Any:
        order = torch.randperm(self.rows)
        shuffled = {name: column[order] for name, column in self.columns.items()}
        for start in range(0, self.rows, self.batch_size):
            yield {n: c[start : start + self.batch_size] for n, c in shuffled.items()}


def plainly(folder: str, batch_size: int, epochs: int, clock: Clock) -> None:
    """Train with only Lightning and the strategy. Runs on every rank."""
    import horovod.torch as hvd

    hvd.init()
    columns = {
        name: torch.from_numpy(np.load(f"{folder}/{name}.npy")[hvd.rank() :: hvd.size()].copy())
        for name in ("features", "label")
    }
    trainer = lightning.Trainer(
        strategy=HorovodStrategy(),
        devices=1,
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[clock],
        logger=TensorBoardLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Net(), InMemory(columns, batch_size))
    hvd.shutdown()


def fit(store: Store, ranks: int, batch_size: int, epochs: int, clock: Clock) -> None:
    """Train with the estimator."""
    LightningEstimator(
        backend=LocalBackend(ranks),
        store=store,
        model=Net(),
        feature_cols=["features"],
        label_cols=["label"],
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[clock],
        verbose=0,
    ).fit_on_parquet()


def main() -> None:
    given, steps = training_options(__doc__)
    speeds: dict[str, list[float]] = {"estimator": [], "plain Lightning": []}
    with tempfile.TemporaryDirectory(prefix="hvd_estimators-lightning-") as directory:
        folder = Path(directory)
        store = Store.create(f"{directory}/store")
        write_regression_data(folder, Path(store.get_train_data_path()), given.rows)
        clock = Clock(str(folder / "seconds.npy"))
        for _ in range(given.repeats):
            arguments_of_ranks = (directory, given.batch_size, given.epochs, clock)
            LocalBackend(given.ranks).run(plainly, arguments_of_ranks)
            speeds["plain Lightning"].append(speed(clock, steps))
            fit(store, given.ranks, given.batch_size, given.epochs, clock)
            speeds["estimator"].append(speed(clock, steps))
    records = compared("steps", speeds, "steps/s", "plain Lightning")
    ratio = records[0].ratio
    show_table(
        f"Lightning, {given.ranks} ranks, batches of {given.batch_size} rows, steps per second",
        ["", "steps/s"],
        [[one.name, one.value] for one in records],
    )
    print(f"\nestimator / plain Lightning: {ratio:.2f} (target: 0.9)")
    figures = {"steps_per_second": speeds, "ratio": ratio}
    show_result("lightning", vars(given), figures, records)


def speed(clock: Clock, steps: int) -> float:
    """Return the steps per second of the best epoch, without the first epoch."""
    return steps / min(np.load(clock.path)[1:].tolist())


if __name__ == "__main__":
    main()
