"""The reference's net as a LightningModule, and its fit."""

from __future__ import annotations

from typing import Any

import torch
from estimators import exact_params
from pytorch_lightning import LightningModule
from reference import OPTIMIZERS, make_net
from torchmetrics import MeanSquaredError

from hvd_estimators.lightning import LightningEstimator


class RegressionSteps:
    """The reference's net and loss, for the LightningModule of either package."""

    log: Any
    parameters: Any

    def __init__(self, optimizer: str = "adam", weighted: bool = False) -> None:
        super().__init__()
        self.net = make_net()
        self.optimizer_name = optimizer
        self.weighted = weighted
        self.squared = MeanSquaredError()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).reshape(-1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        errors = (self(batch["features"]) - batch["label"]) ** 2
        self.log("train_mse", errors.mean())
        if not self.weighted:
            return errors.mean()
        return (errors * batch["weight"].float()).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch["features"])
        self.log("val_loss", torch.nn.functional.mse_loss(output, batch["label"]))
        self.squared(output, batch["label"])
        self.log("val_metric", self.squared)
        self.log("val_most", (output - batch["label"]).abs().max(), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


class Regression(RegressionSteps, LightningModule):
    """The reference's net and loss."""


def fit(
    backend: Any, store: Any, kind: type[LightningEstimator] = LightningEstimator, **params: Any
) -> Any:
    estimator = kind(
        **exact_params(backend, store, **{"model": Regression(), "logger": False, **params})
    )
    return estimator.fit_on_parquet()
