"""Modules whose calls differ by mode, as in detection."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from estimators import exact_params
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches, write_rows
from resuming import kept_checkpoints
from test_resuming import assert_equal_bits

from hvd_estimators.torch import TorchEstimator

pytestmark = pytest.mark.integration

ROWS, BATCH, EPOCHS = 37, 8, 2


class Detector(torch.nn.Module):
    """Model with the interface of torchvision's detection models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.box, self.score = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.noise = torch.nn.Dropout(0.0)

    def forward(self, image: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        box, score = self.box(self.noise(image)), self.score(image)[:, 0]
        if self.training:
            assert target is not None
            near = box.sum(dim=1) - target
            return {"loss_box": near.square().mean(), "loss_score": (score - target).abs().mean()}
        return {"boxes": box, "scores": score}


def total(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return outputs["loss_box"] + outputs["loss_score"]


def step(model: Any, optimizer: Any, _: Any, loss_fn: Any, inputs: Any, labels: Any) -> Any:
    optimizer.zero_grad()
    losses = model(*inputs)
    loss = loss_fn.scale(total(losses))
    loss.backward()
    optimizer.step()
    return losses, loss


@pytest.fixture(scope="module")
def ranks() -> StandingBackend:
    return shared_ranks(2)


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("own_step", [True, False])
def test_a_module_that_returns_losses_in_training_trains_and_predicts(
    ranks: Any, store: Any, own_step: bool, dry_run: bool
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    net = Detector()
    loss = {"train_minibatch_fn": step} if own_step else {"loss": total, "loss_form": "joint"}
    model = TorchEstimator(
        **exact_params(ranks, store, feature_cols=["features", "label"], label_cols=[]),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        outputs=["scores", "boxes"],
        **loss,
        batch_size=BATCH,
        epochs=EPOCHS,
        dry_run=dry_run,
    ).fit_on_parquet()
    alone = Detector()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    x, y = (torch.from_numpy(columns[c]) for c in ("features", "label"))
    for rows in global_batches(ROWS, 2, BATCH) * EPOCHS:
        optimizer.zero_grad()
        total(alone(x[rows], y[rows])).backward()
        optimizer.step()
    for value, other in zip(model.getModel().parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    # transform() needs these shapes.
    assert model.getOrDefault("output_shapes") == [[], [4]]
    with torch.no_grad():
        expected = alone.eval()(x)
    document, load = model._make_predictor()
    found = load(document)([columns["features"], columns["label"]])
    for value, other in zip(found, (expected["scores"], expected["boxes"]), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)


class Normalized(torch.nn.Module):
    """Net with batch normalization that has seen other rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.last = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        self.norm.running_mean.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(x))[:, 0]
        return found


class Freezing:
    """Callback that keeps the statistics of batch normalization, as in fine-tuning."""

    def on_train_begin(self, module: Any, optimizer: Any) -> None:
        self.norm = module.norm

    def on_epoch_begin(self, epoch: int) -> None:
        self.norm.eval()


def test_a_layer_stays_in_the_mode_of_a_callback(ranks: StandingBackend, store: Any) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), 8, seed=1)
    net = Normalized()

    def run(run_id: str) -> Any:
        estimator = TorchEstimator(
            **exact_params(ranks, store, model=net, run_id=run_id, batch_size=BATCH),
            optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
            loss=torch.nn.functional.mse_loss,
            callbacks=[Freezing()],
            epochs=EPOCHS,
            validation=0.5,
            checkpoint_every_n_steps=1,
            keep_checkpoints=99,
        )
        return estimator.fit_on_parquet().getModel()

    found, expected = run("whole"), Normalized()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        expected.train()
        expected.norm.eval()
        for rows in global_batches(ROWS, 2, BATCH):
            optimizer.zero_grad()
            x, y = (torch.from_numpy(columns[name][rows]) for name in ("features", "label"))
            torch.nn.functional.mse_loss(expected(x), y).backward()
            optimizer.step()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    within = [run_id for run_id, (epoch, rows) in kept_checkpoints(store, "whole") if rows]
    # A run that continues within an epoch, too.
    assert_equal_bits(run(within[-1]).state_dict(), found.state_dict())


class Merging(torch.nn.Module):
    """Low-rank adapter that is merged into the weight for evaluation, as loralib's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = torch.nn.Linear(4, 1)
        self.down = torch.nn.Parameter(torch.randn(2, 4) / 2)
        self.up = torch.nn.Parameter(torch.randn(1, 2) / 2)
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if self.merged is mode:
            with torch.no_grad():
                self.base.weight += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = 0.0 if self.merged else x @ (self.up @ self.down).T
        return (self.base(x) + own)[:, 0]


@pytest.mark.parametrize("epochs", [1, 2])
def test_weights_that_evaluation_merges_are_trained_and_saved_apart(
    ranks: Any, store: Any, epochs: int
) -> None:
    columns = write_rows(Path(store.get_train_data_path()), ROWS)
    write_rows(Path(store.get_val_data_path()), ROWS, seed=1)

    def run(last: int) -> Any:
        net = Merging()
        return (
            TorchEstimator(
                **exact_params(ranks, store, run_id="mine"),
                model=net,
                optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
                loss=torch.nn.functional.mse_loss,
                validation=0.5,
                batch_size=BATCH,
                epochs=last,
            )
            .fit_on_parquet()
            .getModel()
        )

    run(epochs)
    found = run(EPOCHS)
    alone = Merging()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    x, y = (torch.from_numpy(columns[c]) for c in ("features", "label"))
    for rows in global_batches(ROWS, 2, BATCH) * EPOCHS:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(found.eval()(x), alone.eval()(x), rtol=1e-4, atol=1e-5)
