"""The network of ``flight_networks.py`` in Lightning: the torch network with Lightning's steps."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from flight_data import INDEXED
from flight_networks import Sizes
from flight_torch import DelayNet
from torch import nn

from hvd_estimators.lightning import LightningEstimator


class DelayModule(lightning.LightningModule):
    """Training and validation steps on a batch, which is a dict of column name to tensor."""

    def __init__(self, sizes: Sizes, label: str, learning_rate: float) -> None:
        super().__init__()
        self.network = DelayNet(sizes)
        self.label = label
        self.learning_rate = learning_rate

    def forward(self, *features: torch.Tensor) -> torch.Tensor:
        return self.network(*features)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = self(*(batch[name] for name in [*INDEXED, "continuous"]))
        return nn.functional.mse_loss(outputs[:, 0], batch[self.label])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.step(batch)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def estimator(sizes: Sizes, learning_rate: float, **params: Any) -> LightningEstimator:
    """Return an estimator of the network in Lightning."""
    (label,) = params["label_cols"]
    return LightningEstimator(model=DelayModule(sizes, label, learning_rate), **params)
