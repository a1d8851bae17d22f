"""Changing sets of trained parameters, and custom optimizers, train as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from estimators import exact_params
from pytorch_lightning import Callback, LightningModule
from rank_pool import StandingBackend, shared_ranks
from reference import WIDTH, assert_same_weights, global_batches, make_net, write_rows

from hvd_estimators.lightning import LightningEstimator
from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH = 37, 8


@pytest.fixture
def ranks() -> StandingBackend:
    return shared_ranks(2)


def fit_torch(backend: Any, store: Any, net: Any, optimizer: Any, **params: Any) -> Any:
    return TorchEstimator(**{**settings(backend, store), **params}, model=net, optimizer=optimizer)


def settings(backend: Any, store: Any) -> dict[str, Any]:
    loss = torch.nn.functional.mse_loss
    return exact_params(backend, store, loss=loss, batch_size=BATCH)


def batches(store: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    x, y = (torch.from_numpy(columns[name]) for name in ("features", "label"))
    return [(x[rows], y[rows, None]) for rows in global_batches(ROWS, 2, BATCH)]


class Unfreeze:
    """Callback that unfreezes one layer after an epoch and adds another to the optimizer."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.module, self.optimizer = module, optimizer

    def on_epoch_begin(self, epoch: int) -> None:
        if epoch == 1:
            self.module[0].requires_grad_(True)
            self.optimizer.add_param_group({"params": [*self.module[2].parameters()], "lr": 0.02})


class UnfreezeInLightning(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)
            group = {"params": [*pl_module.net[2].parameters()], "lr": 0.02}
            trainer.optimizers[0].add_param_group(group)


def half_frozen() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    net = make_net()
    net[0].requires_grad_(False)
    return net, torch.optim.Adam(net[0].parameters(), lr=0.01)


class HalfFrozen(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, _ = half_frozen()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch["features"])[:, 0], batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), lr=0.01)


def train_half_frozen(data: Any, epochs: int) -> torch.nn.Module:
    net, optimizer = half_frozen()
    callback = Unfreeze()
    callback.on_train_begin(net, optimizer)
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return net


@pytest.mark.parametrize("framework", ["torch", "lightning"])
def test_parameters_unfrozen_during_training_train_as_one_process(
    ranks: Any, store: Any, framework: str
) -> None:
    expected = train_half_frozen(batches(store), 4)

    def fit(run_id: str, epochs: int) -> torch.nn.Module:
        more = {"run_id": run_id, "epochs": epochs}
        if framework == "torch":
            net, optimizer = half_frozen()
            estimator = fit_torch(ranks, store, net, optimizer, callbacks=[Unfreeze()], **more)
            return estimator.fit_on_parquet().getModel()
        common = {**settings(ranks, store), "loss": None, **more}
        callbacks = [UnfreezeInLightning()]
        estimator = LightningEstimator(
            **common, model=HalfFrozen(), callbacks=callbacks, logger=False
        )
        return estimator.fit_on_parquet().getModel().net

    whole = fit("whole", 4)
    assert_same_weights(whole, expected)
    for epochs in (2, 4):
        found = fit("parts", epochs)
    for value, other in zip(found.parameters(), whole.parameters(), strict=True):
        assert torch.equal(value, other)


class Gan(torch.nn.Module):
    """Generator of rows and discriminator in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = torch.nn.Sequential(torch.nn.Linear(WIDTH, 6), torch.nn.Tanh())
        self.generator.append(torch.nn.Linear(6, WIDTH))
        self.discriminator = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(x))


def judge(model: Gan, rows: torch.Tensor, real: float) -> torch.Tensor:
    score = model.discriminator(rows)
    return torch.nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, real))


class TwoOptimizers:
    """Step like DCGAN's, which creates the second optimizer itself."""

    def __init__(self) -> None:
        self.second: Any = None

    def __call__(
        self,
        model: Gan,
        optimizer: Any,
        transform_outputs: Any,
        loss_fn: Any,
        inputs: Any,
        labels: Any,
    ) -> Any:
        if self.second is None:
            self.second = torch.optim.Adam(model.generator.parameters(), lr=0.02)
        (x,) = inputs
        fake = model.generator(x.flip(1))
        model.discriminator.zero_grad()
        judge(model, x, 1.0).backward()
        judge(model, fake.detach(), 0.0).backward()
        torch.nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.3)
        optimizer.step()
        model.generator.zero_grad()
        loss = judge(model, fake, 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.generator.parameters(), 0.3)
        self.second.step()
        return model(x), loss

    def state_dict(self) -> dict[str, Any]:
        return {} if self.second is None else self.second.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


def one_optimizer(
    model: Gan, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, labels: Any
) -> Any:
    """Take two steps of one optimizer, which skips parameters without a gradient."""
    (x,) = inputs
    fake = model.generator(x.flip(1))
    optimizer.zero_grad()
    (judge(model, x, 1.0) + judge(model, fake.detach(), 0.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = judge(model, fake, 1.0)
    loss.backward()
    model.discriminator.zero_grad()
    optimizer.step()
    return model(x), loss


@pytest.mark.parametrize("kind", ["two optimizers", "one optimizer"])
def test_a_gan_trains_as_one_process(ranks: Any, store: Any, kind: str) -> None:
    # Each rank has equally many rows in each step, as the function does not weight its losses.
    columns = write_rows(Path(store.get_train_data_path()), 32)
    x = torch.from_numpy(columns["features"])
    net = Gan()
    alone = copy.deepcopy(net)
    step = TwoOptimizers() if kind == "two optimizers" else one_optimizer

    def make_optimizer(gan: Gan) -> torch.optim.Optimizer:
        trained = gan.discriminator if kind == "two optimizers" else gan
        return torch.optim.Adam(trained.parameters(), lr=0.01)

    params = {"train_minibatch_fn": step, "batch_size": 4, "epochs": 3}
    estimator = fit_torch(ranks, store, net, make_optimizer(net), **params)
    found = estimator.fit_on_parquet().getModel()
    step, optimizer = copy.deepcopy(step), make_optimizer(alone)
    for _ in range(3):
        for rows in global_batches(32, 2, 4):
            step(alone, optimizer, None, None, [x[rows]], None)
    assert_same_weights(found, alone)


@pytest.mark.parametrize("framework", ["torch", "lightning"])
def test_validation_uses_the_averaged_weights_of_schedule_free_optimizers(
    ranks: Any, store: Any, framework: str
) -> None:
    import schedulefree

    batches(store)
    held_out = write_rows(Path(store.get_val_data_path()), 20, seed=1)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch["features"])[:, 0], batch["label"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.05)

    more = {"epochs": 2, "validation": 0.5}
    if framework == "torch":
        net = make_net()
        optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.05)
        model = fit_torch(ranks, store, net, optimizer, **more).fit_on_parquet()
        trained, measured = model.getModel(), model.getHistory()[-1]["validation"]["loss"]
        assert not model.getOptimizer().param_groups[0]["train_mode"]
    else:
        common = {**settings(ranks, store), "loss": None, **more}
        model = LightningEstimator(**common, model=Module(), logger=False).fit_on_parquet()
        trained, measured = model.getModel().net, model.getHistory()[-1]["validation"]["val_loss"]
    with torch.no_grad():
        output = trained(torch.from_numpy(held_out["features"]))[:, 0]
    expected = torch.nn.functional.mse_loss(output, torch.from_numpy(held_out["label"]))
    assert measured == pytest.approx(expected.item(), rel=1e-5)
