"""The same small training in each framework, killed and resumed, and its reference."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import lightning_reference
import numpy as np
import pandas as pd
import reference
import torch
from lightning_reference import Regression
from reference import OPTIMIZERS, WIDTH, global_batches, make_net, train_alone

EPOCHS, BATCH_SIZE = 3, 16
FRAMEWORKS = ("torch", "keras", "lightning")
_PATIENCE_SECONDS = 120


def send_by_value() -> None:
    """Pickle this module by value, as ranks cannot import it."""
    for module in (sys.modules[__name__], lightning_reference, reference):
        cloudpickle.register_pickle_by_value(module)


def make_rows(rows: int = 90) -> pd.DataFrame:
    """Return rows, a third of them for validation."""
    rng = np.random.default_rng(4)
    features = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return pd.DataFrame(
        {
            "features": features.tolist(),
            "label": features @ np.arange(1, WIDTH + 1) + 0.5,
            "held out": np.arange(rows) % 3 == 1,
        }
    )


def make_frame(spark: Any) -> Any:
    """Return the rows as a DataFrame, in their order."""
    schema = "features array<float>, label float, `held out` boolean"
    return spark.createDataFrame(make_rows(), schema).coalesce(1)


def make_estimator(framework: str, **params: Any) -> Any:
    """Return an estimator of the framework, with momentum as part of the run's state."""
    settings: dict[str, Any] = {
        "feature_cols": ["features"],
        "label_cols": ["label"],
        "validation": "held out",
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "shuffle": False,
        "scale_learning_rate": False,
        "random_seed": 3,
        "verbose": 0,
        **params,
    }
    if framework == "keras":
        import keras_reference

        from hvd_estimators.keras import KerasEstimator

        return KerasEstimator(
            model=keras_reference.make_net(),
            optimizer=keras_reference.OPTIMIZERS["momentum"](),
            loss="mse",
            **settings,
        )
    if framework == "lightning":
        from hvd_estimators.lightning import LightningEstimator

        return LightningEstimator(model=Regression("momentum"), logger=False, **settings)
    from hvd_estimators.torch import TorchEstimator

    net = make_net()
    return TorchEstimator(
        model=net,
        optimizer=OPTIMIZERS["momentum"](net.parameters()),
        loss=torch.nn.functional.mse_loss,
        **settings,
    )


def predict_alone(framework: str) -> np.ndarray:
    """Train in one process, with the plain framework, and predict all rows."""
    rows = make_rows()
    columns = {
        "features": np.stack(rows["features"]).astype(np.float32),
        "label": rows["label"].to_numpy(np.float32),
    }
    held_out = rows["held out"].to_numpy()
    trained_on = {name: values[~held_out] for name, values in columns.items()}
    batches = global_batches(len(trained_on["label"]), 2, BATCH_SIZE)
    if framework == "keras":
        import keras_reference

        optimizer = keras_reference.OPTIMIZERS["momentum"]()
        net = keras_reference.train_alone(trained_on, batches, optimizer, EPOCHS)
        return net(columns["features"]).numpy().reshape(-1)
    net = train_alone(trained_on, batches, OPTIMIZERS["momentum"], EPOCHS)
    with torch.no_grad():
        return net(torch.from_numpy(columns["features"])).numpy().reshape(-1)


def stopping_callback(framework: str, folder: Path) -> Any:
    """Return a callback that pauses each rank at the start of the second epoch.

    Each rank leaves a file with its process id in the local folder. The rank waits until the
    file ``go on`` exists or until it is killed.
    """
    wait = partial(_wait, str(folder))
    if framework == "keras":
        import keras

        return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: wait(epoch))
    if framework == "lightning":
        from pytorch_lightning.callbacks import LambdaCallback

        return LambdaCallback(
            on_train_epoch_start=lambda trainer, module: wait(trainer.current_epoch)
        )
    return _Waiting(wait)


class _Waiting:
    def __init__(self, wait: Any) -> None:
        self._wait = wait

    def on_epoch_begin(self, epoch: int) -> None:
        self._wait(epoch)


def _wait(folder: str, epoch: int) -> None:
    with open(Path(folder, f"{os.getpid()}.epochs"), "a") as file:
        file.write(f"{epoch}\n")
    if epoch != 1:
        return
    Path(folder, f"{os.getpid()}.pid").touch()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not Path(folder, "go on").exists():
        assert time.monotonic() < deadline, "nobody has let this rank go on, or killed it"
        time.sleep(0.05)


def epochs_begun(folder: Path) -> list[list[int]]:
    """Return the epochs that each rank has started, sorted by these epochs."""
    files = folder.glob("*.epochs")
    return sorted([int(line) for line in file.read_text().split()] for file in files)


@contextlib.contextmanager
def killing_ranks(store: Any, run_id: str, folder: Path, ranks: int = 2) -> Iterator[None]:
    """Kill the ranks that `stopping_callback` pauses, once a checkpoint exists to resume from."""
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while len(list(folder.glob("*.pid"))) < ranks or not store.get_checkpoints(run_id):
                assert time.monotonic() < deadline, "there is no checkpoint, or there are no ranks"
                time.sleep(0.1)
            for file in folder.glob("*.pid"):
                os.kill(int(file.stem), signal.SIGKILL)
            (folder / "go on").touch()
        except BaseException as error:
            failed.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        killer.join()
        if failed:
            raise failed[0]
