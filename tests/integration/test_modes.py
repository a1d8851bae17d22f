"""Modules whose calls differ by mode, as in detection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from estimators import exact_params
from rank_pool import StandingBackend, shared_ranks
from reference import global_batches, write_rows

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
