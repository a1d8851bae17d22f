"""Hooks that set the model's buffers and rates, on as many ranks as the run began with and on one.

Expected values are of one process that trains on the rows of both ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import torch
from fewer_ranks import FourShards
from keras_reference import make_estimator
from lightning_reference import fit as fit_lightning
from pytorch_lightning import Callback, LightningModule
from rank_pool import shared_ranks
from reference import WIDTH, fit, global_batches, make_net, write_rows

from hvd_estimators.keras import KerasEstimator
from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH, EPOCHS, RATE = 32, 4, 3, 0.05


def setup_module() -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])


class TwoShards(FourShards):
    """Mixin that makes an estimator train as in a run started with 2 ranks."""

    shards = 2


class TorchOfTwo(TwoShards, TorchEstimator):
    pass


class LightningOfTwo(TwoShards, LightningEstimator):
    pass


class KerasOfTwo(TwoShards, KerasEstimator):
    pass


class Net(torch.nn.Module):
    """Net whose output is divided by a temperature, and that counts an epoch's rows."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.net = make_net()
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.counts:
            self.rows += len(x)
        return self.net(x)[:, 0] / self.temperature


def temperature_of(epoch: int) -> float:
    return 2.0**epoch


def train_alone(columns: Any, rates: Any = None) -> Net:
    """Train in one process, where each step may have its own rate."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    steps = 0
    for epoch in range(EPOCHS):
        net.temperature.fill_(temperature_of(epoch))
        net.rows.zero_()
        for rows in global_batches(ROWS, 2, BATCH):
            output = net(torch.from_numpy(columns["features"][rows]))
            loss = ((output - torch.from_numpy(columns["label"][rows])) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = RATE if rates is None else rates(steps)
            optimizer.step()
            steps += 1
    return net


class Annealing:
    """Callback of torch that sets the temperature of each epoch."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.module = module

    def on_epoch_begin(self, epoch: int) -> None:
        self.module.temperature.fill_(temperature_of(epoch))
        self.module.rows.zero_()


class Steps(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(counts=False)

    def on_train_epoch_start(self) -> None:
        self.net.rows.zero_()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.net.rows += len(batch["label"])  # for each shard, unlike other hooks
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.temperature = torch.tensor(temperature_of(self.current_epoch))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return ((self.net(batch["features"]) - batch["label"]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("framework", ["torch", "lightning"])
def test_buffers_that_hooks_set_reach_all_shards(store: Any, framework: str, ranks: int) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    given: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS}
    given["buffer_reduction"] = {"rows": "sum"}
    backend = shared_ranks(ranks)
    if framework == "torch":
        net = Net()
        given.update(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=RATE))
        given.update(callbacks=[Annealing()], loss=torch.nn.functional.mse_loss)
        found = fit(store, ranks, "sgd", kind=TorchOfTwo, backend=backend, **given)[0].getModel()
    else:
        found = fit_lightning(backend, store, LightningOfTwo, model=Steps(), **given).getModel().net
    for name, expected in train_alone(columns).state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], expected, msg=name)


def warmed_up(step: int) -> float:
    return RATE * (step + 1) / 12


class WarmingUp(Callback):
    """Callback that sets the rate of each step right before the step, for one process."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        (group,) = optimizer.param_groups
        assert group["lr"] in (RATE, warmed_up(trainer.global_step - 1))
        group["lr"] = warmed_up(trainer.global_step)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_rates_that_a_hook_sets_within_a_step_are_scaled(store: Any, precision: str) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    found = fit_lightning(
        shared_ranks(2),
        store,
        model=Steps(),
        batch_size=BATCH,
        epochs=EPOCHS,
        scale_learning_rate=True,
        callbacks=[WarmingUp()],
        trainer_args={"precision": precision},
    ).getModel()
    alone = train_alone(columns, lambda step: 2 * warmed_up(step)).net.state_dict()
    start = make_net().state_dict()
    is_exact = precision == "32-true"
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if is_exact else {"rtol": 0.1, "atol": 2e-2}
    for name, expected in alone.items():
        moved = found.net.net.state_dict()[name] - start[name]
        torch.testing.assert_close(moved, expected - start[name], msg=name, **tolerance)


@keras.saving.register_keras_serializable("tests")
class Tempered(keras.layers.Layer):
    """Layer that divides by a temperature."""

    def build(self, shape: Any) -> None:
        self.temperature = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        return x / self.temperature


class KerasAnnealing(keras.callbacks.Callback):
    """Callback that sets the temperature of each epoch."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch, self.epoch = by_batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if not self.by_batch:
            self.model.get_layer("tempered").temperature.assign(temperature_of(epoch))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.by_batch:
            self.model.get_layer("tempered").temperature.assign(temperature_of(self.epoch))


@pytest.mark.parametrize(("ranks", "by_batch"), [(2, True), (1, True), (1, False)])
def test_variables_that_callbacks_of_keras_set_reach_all_shards(
    store: Any, ranks: int, by_batch: bool
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)

    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        x = keras.Input((WIDTH,))
        hidden = keras.layers.Dense(8, activation="tanh")(x)
        return keras.Model(x, Tempered(name="tempered")(keras.layers.Dense(1)(hidden)))

    estimator = make_estimator(
        store,
        ranks,
        backend=shared_ranks(ranks, "tensorflow"),
        kind=KerasOfTwo,
        model=make(),
        optimizer=keras.optimizers.SGD(RATE),
        batch_size=BATCH,
        epochs=EPOCHS,
        callbacks=[KerasAnnealing(by_batch)],
    )
    found = estimator.fit_on_parquet().getModel()
    alone = make()
    alone.compile(keras.optimizers.SGD(RATE), "mse")
    for epoch in range(EPOCHS):
        alone.get_layer("tempered").temperature.assign(temperature_of(epoch))
        for rows in global_batches(ROWS, 2, BATCH):
            alone.train_on_batch(columns["features"][rows], columns["label"][rows, None])
    for a, b in zip(found.weights, alone.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=a.path)
