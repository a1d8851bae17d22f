"""Small fits with dropout and a changing learning rate, one for each framework.

They use double precision, so that sums in another order are nearly equal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import reference
import torch
from kills import RANKS, Length, event
from pytorch_lightning import LightningModule
from reference import WIDTH, write_rows

ROWS, VALIDATION_ROWS, BATCH_SIZE, EPOCHS, EVERY = 107, 30, 8, 2, 3
STEPS = 7
"""Of an epoch, on two ranks."""

LENGTH = Length(
    steps=EPOCHS * STEPS, validations=2 * EPOCHS, checkpoints=8 * (EPOCHS * STEPS // EVERY)
)
"""How many events a run has, of checkpoints as many as there are at least."""

MOST_LOST = 2 * EVERY * RANKS + (RANKS - 1)
"""Steps of all ranks that are trained again at most.

A checkpoint may be on its way to the store until the next one is due. Rank 0 then waits for it at
the end of a step, when the others may have begun the next one.
"""


def write_data(store: Any) -> None:
    """Write the training and validation rows."""
    write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), VALIDATION_ROWS, seed=1)


def make_estimator(framework: str, **params: Any) -> Any:
    """Return an estimator of the framework."""
    settings: dict[str, Any] = {
        "feature_cols": ["features", "id"],
        "label_cols": ["label"],
        "validation": 0.1,
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "random_seed": 3,
        "verbose": 0,
        **params,
    }
    return _MAKERS[framework](settings)


def end_of(framework: str, model: Any) -> dict[str, Any]:
    """Return the final state of a fit as arrays and plain values by name."""
    net = model.getModel()
    if framework == "keras":
        variables = [*net.variables, *net.optimizer.variables]
        # Layers that are built again in one process have other names.
        found = {f"{index}": variable.numpy() for index, variable in enumerate(variables)}
    else:
        found = {name: value.numpy() for name, value in net.state_dict().items()}
        if framework == "torch":
            found["optimizer"] = _plain(model.getOptimizer().state_dict())
    history = model.getHistory()
    if framework == "lightning":
        # The logged values of an epoch that is resumed midway are those of its second part.
        history = [record["validation"] for record in history]
    return {**found, "history": history}


def assert_equal_bits(found: Any, expected: Any) -> None:
    """Compare two results of `end_of`."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)
        else:
            assert found[name] == value, name


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


class Net(torch.nn.Module):
    """4-8-1 net with dropout and batch statistics; reports each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        ).double()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            event("step", ids)
        else:
            event("validation")
        return self.layers(x.double()).reshape(-1)


def squared_error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, label.double().reshape(-1))


class Scheduler:
    """Callback that halves a torch optimizer's learning rate in each epoch."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.scheduler.step()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


def _torch(settings: dict[str, Any]) -> Any:
    from hvd_estimators.torch import TorchEstimator

    net = Net()
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        loss=squared_error,
        callbacks=[Scheduler()],
        **settings,
    )


class Module(LightningModule):
    """The same net with a learning rate that changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.net(x, ids)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = squared_error(self(batch["features"], batch["id"]), batch["label"])
        self.log("loss", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch["features"], batch["id"])
        self.log("val_loss", squared_error(output, batch["label"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _lightning(settings: dict[str, Any]) -> Any:
    from hvd_estimators.lightning import LightningEstimator

    return LightningEstimator(model=Module(), logger=False, **settings)


def _keras(settings: dict[str, Any]) -> Any:
    import keras
    import kill_layers

    from hvd_estimators.keras import KerasEstimator

    cloudpickle.register_pickle_by_value(kill_layers)
    return KerasEstimator(
        model=kill_layers.make_net(),
        custom_objects={"Telling": kill_layers.Telling},
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.8)),
        loss="mse",
        **settings,
    )


_MAKERS = {"torch": _torch, "keras": _keras, "lightning": _lightning}


def send_by_value() -> None:
    """Pickle this module by value, as ranks cannot import it."""
    for module in (sys.modules[__name__], reference):
        cloudpickle.register_pickle_by_value(module)
